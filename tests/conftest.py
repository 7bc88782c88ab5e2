"""Setup shared by every test: no network, shapes in signatures checked, the same number of threads everywhere."""

import os
from pathlib import Path

import hypothesis
import pytest
import torch
from jaxtyping import install_import_hook

# Before any test module imports them, the Hugging Face libraries are told to look at local files only: a test that
# would download something fails at once instead of hanging on a machine without a network.
for variable in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY"):
    os.environ[variable] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# The shapes in the signatures of forklora/ are executed: a call whose tensors do not fit them fails in every test. A
# trace checks its shapes itself, in every run, and its tests ask for its own words.
FOLDER = Path(__file__).resolve().parent.parent / "forklora"
CHECKED = {path.stem for path in FOLDER.glob("[!_]*.py")} - {"trace"}
install_import_hook([f"forklora.{room}" for room in sorted(CHECKED)], "beartype.beartype")

# The first example of a law pays for imports and warm-up: how long it takes says nothing about the law.
hypothesis.settings.register_profile("laws", deadline=None)
hypothesis.settings.load_profile("laws")


@pytest.fixture(autouse=True)
def threads(request):
    """Tiny models run fastest, and the same everywhere, on one thread; the slow tests use every core."""
    before = torch.get_num_threads()
    torch.set_num_threads((os.cpu_count() or 1) if request.node.get_closest_marker("slow") else 1)
    yield
    torch.set_num_threads(before)
