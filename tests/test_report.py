"""The report is a pure function of the records: figures, failures, escaping, size, nothing from outside the page."""

import json
import math
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from forklora.recipes.report import read_arms, summary_markdown, summary_table, write_report

SHAPES = {"lora": (350208, 1.1), "span": (201600, 1.35), "block": (3360, 1.3)}


def make_recipe() -> dict[str, Any]:
    """A resolved recipe of three arms, nulls kept."""
    arms = [
        {"name": "lora r1", "adapter": "lora", "rank": 1, "width": None, "optimizer": "adamw", "rate": 0.003},
        {"name": "span r1", "adapter": "span", "rank": 1, "width": None, "optimizer": "length", "rate": 0.05},
        {"name": "block 4x4", "adapter": "block", "rank": 4, "width": 4, "optimizer": "length", "rate": 0.05},
    ]
    return {
        "name": "quickstart",
        "description": "Rank-one ForkLoRA against rank-one LoRA on few-shot multiplication.",
        "model": {"name": "smollm2-135m", "dtype": "float32"},
        "task": {"name": "multiplication", "options": {}},
        "sampling": {"max_new_tokens": 6, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "stop": ["\n"]},
        "evaluation": {"every": 2, "prompts": 128, "samples": 4},
        "prompts": 16,
        "group": 8,
        "steps": 15,
        "target": 0.8,
        "seed": 0,
        "arms": [arm | {"centering": "sampler", "train_basis": False, "targets": "all-linear"} for arm in arms],
    }


def make_record(name: str, *, seed: int = 0) -> dict[str, Any]:
    """A finished arm of `make_recipe` with noisy curves that rise from about 0.59."""
    recipe, chance = make_recipe(), random.Random(f"{name}{seed}")
    arm = next(arm for arm in recipe["arms"] if arm["name"] == name)
    trained, speed = SHAPES[arm["adapter"]]
    curve = []
    for step in range(16):
        level = 0.59 + 0.28 * (1 - math.exp(-speed * step / 4.5))
        reward = None if step == 0 else round(level - 0.01 + chance.gauss(0, 0.035), 4)
        held_out = round(level + chance.gauss(0, 0.012), 4) if step % 2 == 0 or step == 15 else None
        seconds = 9.4 + step * 11.7 * speed
        curve.append({"step": step, "rollouts": 128 * step, "seconds": seconds, "train_reward": reward})
        curve[-1]["eval_reward"] = held_out
    reached = next(point for point in curve if (point["eval_reward"] or 0) >= 0.8)
    return {
        "status": "done",
        "arm": name,
        "task": "multiplication",
        "seed": seed,
        "recipe": recipe,
        "versions": {"forklora": "0.1.0", "torch": "2.13.0", "transformers": "5.24.0", "peft": "0.21.2"},
        "commit": "0123456789abcdef0123456789abcdef01234567",
        "dirty": False,
        "hardware": {"cpu": "two cores", "threads": 2, "memory_bytes": 8 * 2**30, "accelerator": None},
        "curve": curve,
        "init_seconds": 9.4,
        "target": 0.8,
        "steps_to_target": reached["step"],
        "rollouts_to_target": reached["rollouts"],
        "seconds_to_target": reached["seconds"],
        "eval_reward_start": curve[0]["eval_reward"],
        "eval_reward_final": curve[-1]["eval_reward"],
        "peak_memory_bytes": 1_912_602_624,
        "trained_parameters": trained,
        "adapter_bytes": 4 * trained + 2344,
        "step0_hash": "5d1f0c77",
        "base_hash": "a91be24c",
        "spectrum": None if arm["adapter"] == "lora" else [8.3 * math.exp(-0.31 * i) + 1e-4 for i in range(64)],
        "error": None,
    }


def make_trace(rollouts: int, length: int, *, prompt: str = "2 * 3 = 6\n7 * 8 = 56\n9 * 6 =") -> dict[str, Any]:
    """Rollouts whose every fourth position is a fork of eight candidates."""
    chance, rows = random.Random(0), []
    words = [" 5", " 54", "4", "\n", " 63", " 4", " 56", "6"]
    for _ in range(rollouts):
        tokens = []
        for position in range(length):
            weights = [chance.random() ** 4 + 1e-3 for _ in words] if position % 4 == 0 else [1.0] + [1e-4] * 7
            shares = sorted((weight / sum(weights) for weight in weights), reverse=True)
            names = chance.sample(words, len(words))
            drawn = chance.choices(range(len(words)), shares)[0]
            token: dict[str, Any] = {"text": names[drawn], "probability": shares[drawn]}
            token["spread"] = 14 * (1 - sum(share**2 for share in shares))
            token["candidates"] = [list(pair) for pair in zip(names, shares, strict=True)]
            tokens.append(token)
        rows.append({"prompt": prompt, "reward": float(chance.random() < 0.6), "tokens": tokens})
    return {"prompts": [prompt], "rows": rows}


def save_arm(folder: Path, record: dict[str, Any], trace: dict[str, Any] | None = None) -> None:
    """Write one arm's folder as the run does."""
    arm = folder / record["arm"].replace(" ", "-")
    (arm / "trace").mkdir(parents=True, exist_ok=True)
    (arm / "record.json").write_text(json.dumps(record), encoding="utf-8")
    if trace is not None:
        (arm / "trace" / "tokens.json").write_text(json.dumps(trace), encoding="utf-8")


class Page(HTMLParser):
    """What a browser would see: tags with their attributes, the tables' cells by row, and all text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.words = ""
        self.cell = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Remember the tag, open a row or a cell."""
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        if tag in {"td", "th"}:
            self.rows[-1].append("")
            self.cell = True

    def handle_endtag(self, tag: str) -> None:
        """Close a cell."""
        self.cell = self.cell and tag not in {"td", "th"}

    def handle_data(self, data: str) -> None:
        """Collect text, into the open cell if there is one."""
        self.words += data
        if self.cell:
            self.rows[-1][-1] += data


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with two finished arms, one failed before its first step and one interrupted."""
    save_arm(tmp_path, make_record("span r1"), make_trace(6, 24))
    save_arm(tmp_path, make_record("lora r1"))
    block = make_record("block 4x4")
    block |= dict.fromkeys(("eval_reward_final", "steps_to_target", "rollouts_to_target", "seconds_to_target"))
    save_arm(tmp_path, block | {"status": "interrupted", "curve": block["curve"][:6], "error": "stopped after step 5"})
    broken = {"status": "failed", "arm": "wide", "error": "ValueError: rank 64 asked, forks support 17 | <b>17</b>"}
    save_arm(tmp_path, dict.fromkeys(block) | broken)
    return tmp_path


def read_page(folder: Path) -> tuple[str, Page]:
    """Write the report; its text and the parsed page."""
    text = write_report(folder).read_text(encoding="utf-8")
    return text, Page(text)


def test_table_equals_the_records(run: Path) -> None:
    record = make_record("span r1")
    shown = {row[0]: row[1:] for row in read_page(run)[1].rows[:8]}["span r1"]
    figures = [cell.replace(",", "").split(" ") for cell in shown[2:10]]
    assert shown[:2] == ["span, rank 1", "length 0.05"]
    assert [cell[0] for cell in figures[:1]] == [str(record["trained_parameters"])]
    assert [float(figures[1][0]), float(figures[1][2])] == pytest.approx(
        [record["eval_reward_start"], record["eval_reward_final"]], abs=5e-4
    )
    assert [int(cell[0]) for cell in figures[2:4]] == [record["steps_to_target"], record["rollouts_to_target"]]
    durations = [record["seconds_to_target"], record["curve"][-1]["seconds"]]
    assert [float(cell[0]) for cell in figures[4:6]] == pytest.approx(durations, abs=0.5)
    assert float(figures[6][0]) == pytest.approx(record["peak_memory_bytes"] / 2**20, abs=0.5)
    assert float(figures[7][0]) == pytest.approx(record["adapter_bytes"] / 2**10, abs=0.05)
    assert shown[10] == "done"


def test_arms_stand_in_the_order_of_the_recipe(run: Path) -> None:
    names = ["lora r1", "span r1", "block 4x4", "wide"]
    assert [row[0] for row in read_page(run)[1].rows if row[0] in names] == names


def test_table_of_the_command_line_is_the_table_of_the_page(run: Path) -> None:
    records = [record for record, _ in read_arms(run)]
    page = [row for row in read_page(run)[1].rows if len(row) == 12][1:]
    rows = summary_table(records)
    assert page == [[cell for heading, cell in row.items() if heading != "error"] for row in rows]
    lines = summary_markdown(records).splitlines()
    assert [len(re.findall(r"(?<!\\)\|", line)) for line in lines] == [14] * (2 + len(records))
    assert lines[2].split(" | ") == ["| lora r1", *list(rows[0].values())[1:-1], "— |"]
    assert "error" not in summary_markdown([make_record("span r1")])
    assert summary_markdown([]) == ""


def test_failed_and_interrupted_arms_are_visible(run: Path) -> None:
    page = read_page(run)[1]
    assert ["ValueError: rank 64 asked, forks support 17 | <b>17</b>"] in page.rows
    assert ["stopped after step 5"] in page.rows
    assert {row[11] for row in page.rows if len(row) == 12} == {"Status", "done", "failed", "interrupted"}
    assert "2 of 4 arms reached" in page.words
    assert "not finished: block 4x4 interrupted and wide failed" in page.words


@pytest.mark.parametrize("content", ["{", "[]", "\xff", "null"])
def test_an_unreadable_record_is_a_failed_row(run: Path, content: str) -> None:
    (run / "lora-r1" / "record.json").write_bytes(content.encode("latin-1"))
    (run / "span-r1" / "trace" / "tokens.json").write_bytes(content.encode("latin-1"))
    page = read_page(run)[1]
    assert any(row[0] == "lora-r1" and row[11] == "failed" for row in page.rows if len(row) == 12)
    assert page.words.count("record.json could not be read") == 2  # in the table and in the details
    assert page.words.count("trace/tokens.json could not be read") == 1


def test_no_record_is_an_error_that_names_the_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path))):
        write_report(tmp_path)


def test_page_loads_nothing(run: Path) -> None:
    text, page = read_page(run)
    links = [value for _, attributes in page.tags for key, value in attributes.items() if key in {"src", "href"}]
    assert links == ["data:,"]
    assert not re.search(r"url\(|@import|https?://", text)
    assert not {tag for tag, _ in page.tags} & {"script", "iframe", "img", "object", "embed", "base", "form"}
    policy = next(attributes["content"] for _, attributes in page.tags if "http-equiv" in attributes)
    assert policy is not None and policy.startswith("default-src 'none'")


def test_every_text_is_escaped(tmp_path: Path) -> None:
    attack = "<script>alert('x')</script>\"'--><svg onload=alert(1)>{{ 7 * 7 }}{0}\udc80\x00\x1b"
    record = make_record("span r1") | {"arm": attack, "task": attack, "error": attack, "status": attack}
    record["recipe"]["arms"][1] |= {"name": attack, "optimizer": attack}
    record["recipe"]["model"]["name"] = attack
    record["versions"][attack] = attack
    trace = make_trace(1, 8, prompt=attack)
    trace["rows"][0]["tokens"][0] |= {"text": attack, "candidates": [[attack, 0.6], ["a", 0.4]]}
    save_arm(tmp_path, record | {"arm": "x"})
    (tmp_path / "x" / "record.json").write_text(json.dumps(record), encoding="utf-8")
    (tmp_path / "x" / "trace" / "tokens.json").write_text(json.dumps(trace), encoding="utf-8")
    text, page = read_page(tmp_path)
    assert "script" not in {tag for tag, _ in page.tags}
    assert not any("onload" in attributes for _, attributes in page.tags)
    popups = [attributes["data-c"] for _, attributes in page.tags if "data-c" in attributes]
    assert popups[0] is not None and popups[0].startswith(
        "drawn <script>alert('x')</script>\"'--><svg·onload=alert(1)>"
    )
    assert popups[0].splitlines()[0].count("{{·7·*·7·}}{0}‹DC80›‹0›‹1B›") == 1
    assert not re.search("[\x00-\x09\x0b-\x1f]", text)


def test_page_is_a_pure_function_of_the_records(run: Path) -> None:
    first = write_report(run).read_bytes()
    for path in run.glob("*/record.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"an unknown key": [1]}), encoding="utf-8")
    assert write_report(run).read_bytes() == first
    assert sorted(path.name for path in run.iterdir()) == ["block-4x4", "lora-r1", "report.html", "span-r1", "wide"]


def test_a_page_that_cannot_be_written_leaves_nothing_behind(run: Path) -> None:
    (run / "report.html").mkdir()
    with pytest.raises(OSError):
        write_report(run)
    assert not list(run.glob(".report*"))


def test_size_of_a_long_page(tmp_path: Path) -> None:
    save_arm(tmp_path, make_record("span r1"), make_trace(16, 200))
    assert write_report(tmp_path).stat().st_size < 1_000_000


@pytest.mark.parametrize("value", [None, math.nan, math.inf])
def test_missing_values_stay_missing(tmp_path: Path, value: float | None) -> None:
    kept = ("arm", "recipe", "versions", "hardware", "status", "task")
    record = {key: old if key in kept else value for key, old in make_record("span r1").items()}
    point = {"step": 0, "rollouts": value, "seconds": value, "train_reward": value, "eval_reward": value}
    save_arm(tmp_path, record | {"curve": [point, {}], "spectrum": [value], "error": None})
    text, page = read_page(tmp_path)
    row = next(row for row in page.rows if row[0] == "span r1")
    assert row[3:11] == ["—"] * 8
    assert "No arm was evaluated" in page.words
    assert not re.search(r"\b(nan|inf|None)\b", text)


def test_arms_with_one_trace_share_one_map(run: Path) -> None:
    trace = make_trace(6, 24)
    save_arm(run, make_record("lora r1"), trace)
    page = read_page(run)[1]
    assert "Recorded for lora r1, span r1." in page.words
    assert sum("data-c" in attributes for _, attributes in page.tags) == 6 * 24
    assert "At 36 of 144 positions" in page.words


def test_details_hold_every_setting_once_where_all_arms_agree(run: Path) -> None:
    record = make_record("lora r1")
    save_arm(run, record | {"versions": record["versions"] | {"peft": "0.21.3"}})
    words = read_page(run)[1].words
    assert [words.count(text) for text in ("2.13.0", "0.21.3", "0.21.2", record["commit"])] == [1, 1, 2, 1]
    assert [words.count(text) for text in ("sampling.temperature1.0", "rate0.05", "adapterlora")] == [1, 2, 1]
