"""Says in words what was compared, and what its records show: no more than they do."""

from collections.abc import Sequence

from forklora.recipes.comparison_parts import Comparison, Entry
from forklora.recipes.intervals import shown


def facts(found: Comparison) -> dict[str, str]:
    """What was compared, with which budget, on what machine."""
    grid = found.grid
    done = [run.record for run in found.runs if run.status == "done"]
    step = grid["prompts"] * grid["group"]
    rounds = "; ".join(f"{trial['steps']} steps, {trial['keep']} kept" for trial in grid["trials"])
    hardware = {(record.get("hardware") or {}).get("processor"): (record.get("hardware") or {}) for record in done}
    commits = sorted({f"{str(record.get('commit'))[:12]}{', changed' * bool(record.get('dirty'))}" for record in done})
    versions = (done[-1].get("versions") or {}) if done else {}
    return {
        "model": f"{grid['model']['name']} in {grid['model']['dtype']}",
        "tasks": ", ".join(task["name"] for task in grid["tasks"]),
        "budget": f"{grid['steps']} steps of {step} rollouts ({grid['prompts']} prompts x {grid['group']})",
        "rates": f"{len(set(grid['arms'][0]['rates']))} for each arm and task, in rounds: {rounds}; on validation "
        f"questions, seed {grid['trial_seed']}",
        "seeds": ", ".join(str(seed) for seed in grid["seeds"]),
        "launched": f"DeepSpeed {grid['deepspeed'] or 'none'}, ranks {grid['ranks']}, side by side {grid['beside']}",
        "machine": "; ".join(f"{name}, {facts.get('cores')} cores" for name, facts in hardware.items()),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
        "commit": "; ".join(commits),
        "runs": f"{len(done)} done, {len(found.failures)} failed or missing",
    }


def verdict(found: Comparison) -> str:
    """What the intervals of final accuracy show against the baseline, task by task, and who is first at the target."""
    parts = [_of_task(found, task["name"], target=task["target"]) for task in found.grid["tasks"]]
    return " ".join(part for part in parts if part)


def _of_task(found: Comparison, task: str, *, target: float | None) -> str:
    baseline = found.grid["baseline"]
    entries = [entry for entry in found.entries if entry.task == task and entry.finals]
    others = [entry for entry in entries if entry.arm != baseline]
    if not others:
        return f"{task}: nothing is reported yet."
    above = [e.arm for e in others if shown(e.difference) and (e.difference.mean or 0) > 0]
    below = [e.arm for e in others if shown(e.difference) and (e.difference.mean or 0) < 0]
    said = [f"above {baseline} at the end: {_names(above)}", f"below it: {_names(below)}"]
    alone = sum(entry.difference.low is None for entry in others)
    open_ = len(others) - len(above) - len(below) - alone
    said += [f"no difference shown for {open_} of {len(others)}"]
    said += [f"no interval, for want of seeds, for {alone}"] if alone else []
    return f"{task}: {'; '.join(said)}.{_first(entries, target)}"


def _first(entries: Sequence[Entry], target: float | None) -> str:
    reached = [(entry.rollouts_to_target, entry.arm) for entry in entries if entry.rollouts_to_target is not None]
    if target is None:
        return ""
    if not reached:
        return f" No arm reached {target:g} in half of its seeds."
    fewest = min(reached)[0]
    first = [arm for rollouts, arm in reached if rollouts == fewest]
    return f" First at {target:g}: {_names(first)}, after {fewest:,.0f} rollouts."


def _names(arms: Sequence[str]) -> str:
    return ", ".join(arms) or "none"
