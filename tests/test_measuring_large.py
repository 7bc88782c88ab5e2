"""A pair of checkpoints in the shapes of a seven-billion model is measured within four gigabytes of memory."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

WIDTH, INNER, VOCABULARY, RANK = 4096, 11008, 32000, 8
NORM = 50.0  # of every update: far above what storage in bfloat16 rounds off
SHAPES = {"model.embed_tokens.weight": (VOCABULARY, WIDTH), "lm_head.weight": (VOCABULARY, WIDTH)} | {
    f"model.layers.{i}.{name}.weight": shape
    for i in range(2)
    for name, shape in {
        **{f"self_attn.{side}_proj": (WIDTH, WIDTH) for side in "qkvo"},
        "mlp.gate_proj": (INNER, WIDTH),
        "mlp.up_proj": (INNER, WIDTH),
        "mlp.down_proj": (WIDTH, INNER),
        "input_layernorm": (WIDTH,),
    }.items()
}
COMMAND = "import sys; from forklora.recipes.cli import main; sys.exit(main())"
MOVED = "model.layers.1.mlp.up_proj.weight"


def tensor(name, *, moved):
    """A random weight in bfloat16; where it moved, a random update of low rank and known norm is in it."""
    shape = SHAPES[name]
    generator = torch.Generator().manual_seed(sorted(SHAPES).index(name))
    weight = torch.randn(shape, generator=generator).mul_(0.02)
    if moved and name == MOVED:
        u, v = (torch.linalg.qr(torch.randn(d, RANK, generator=generator)).Q for d in shape)
        weight += NORM / RANK**0.5 * u @ v.T
    return weight.bfloat16()


def sharded(folder, *, moved):
    """A folder with one file for each weight, and their index; nothing but one weight is in memory."""
    folder.mkdir()
    index = {}
    for i, name in enumerate(SHAPES):
        index[name] = f"model-{i + 1:05d}-of-{len(SHAPES):05d}.safetensors"
        save_file({name: tensor(name, moved=moved)}, folder / index[name])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return sum(file.stat().st_size for file in folder.iterdir())


@pytest.mark.slow
def test_a_pair_of_two_gigabytes_is_measured_within_four(tmp_path):
    size = sharded(tmp_path / "base", moved=False) + sharded(tmp_path / "tuned", moved=True)
    assert size >= 2 * 10**9
    out = tmp_path / "out"
    command = [sys.executable, "-c", COMMAND, "measure", str(tmp_path / "base"), str(tmp_path / "tuned")]
    process = subprocess.Popen([*command, "--output", str(out)], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    assert usage.ru_maxrss * 1024 <= 4 * 2**30
    found = json.loads((out / "measure.json").read_text())
    assert len(found["matrices"]) == 16 and len(found["vectors"]) == 2
    for matrix in found["matrices"]:
        if matrix["name"] != MOVED:
            assert matrix["unchanged_bf16"] == 1 and matrix["norm"] == 0
            continue
        assert matrix["norm"] == pytest.approx(NORM, rel=1e-2) and not matrix["exact"]
        assert matrix["stable_rank"] == pytest.approx(RANK, rel=2e-2)
        assert matrix["top_energy"] == pytest.approx(1, abs=1e-2)
