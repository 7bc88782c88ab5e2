"""A batch that runs in several passes: the same update, the vocabulary left alone, groups together, time kept."""

import pytest
import torch
from forklora.trainers.bridge import PhaseClock
from peft import get_peft_model_state_dict
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from forklora.passes import regrouped
from tiny_policy import trainer_of

SGD = {"step_length": None, "optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0, "scale_rewards": "none"}


def adapter_of(trainer):
    return {n: t.clone() for n, t in get_peft_model_state_dict(trainer.model).items()}


@pytest.mark.parametrize("changes", [{}, {"gradient_accumulation_steps": 2}, {"gradient_checkpointing": True}])
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo"])
def test_the_update_does_not_depend_on_the_size_of_a_pass(loss_type, changes, tmp_path):
    found, counts = [], []
    for tokens in (1, 40, 10_000):
        trainer = trainer_of(tmp_path, loss_type=loss_type, pass_tokens=tokens, **SGD, **changes)
        whole, passes = trainer.passes, []
        trainer.passes = lambda batch, whole=whole, passes=passes: passes.append(whole(batch)) or passes[-1]
        trainer.train()
        counts.append(max(len(p) for p in passes))
        found.append((adapter_of(trainer), trainer.state.log_history[0]["loss"]))
    assert counts[0] > counts[1] > counts[2] == 1
    assert any(t.abs().max() > 1e-3 for n, t in found[0][0].items() if "lora_A" in n)
    for adapter, loss in found[1:]:
        assert loss == pytest.approx(found[0][1], rel=1e-4, abs=1e-6)
        for name, tensor in found[0][0].items():
            torch.testing.assert_close(adapter[name], tensor, rtol=1e-3, atol=1e-6)


def test_evaluation_in_passes_gives_the_loss_and_leaves_no_gradient(tmp_path):
    found = []
    for tokens in (1, 10_000):
        trainer = trainer_of(tmp_path, pass_tokens=tokens, moved=True)
        trainer.model.train()
        batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
        with torch.no_grad():
            found.append(float(trainer._compute_loss(trainer.model, batch)))
        assert all(p.grad is None for p in trainer.model.parameters())
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_only_rows_with_a_signal_run_and_the_update_is_as_if_all_did(tmp_path):
    """One group in two has equal rewards: its rows are left out, and still counted in the normalization."""
    found, tokens, carrying = [], [], []
    for skipping in (True, False):
        trainer = trainer_of(tmp_path, reward=every_other, loss_type="dr_grpo", **SGD)
        seen = []
        trainer.model.get_input_embeddings().register_forward_pre_hook(
            lambda _, given, seen=seen: seen.append(given[0].numel()) if torch.is_grad_enabled() else None
        )
        if not skipping:
            trainer.passes = lambda batch: [torch.arange(len(batch["advantages"]))]
        trainer.train()
        found.append(adapter_of(trainer))
        tokens.append(sum(seen))
        carrying.append(trainer.state.log_history[0].get("forks/carrying_rows"))
    assert carrying[0] == 0.5 and tokens[0] < 0.8 * tokens[1]
    assert any(t.abs().max() > 1e-4 for n, t in found[0].items() if "lora_A" in n)
    for name, tensor in found[0].items():
        torch.testing.assert_close(found[1][name], tensor, rtol=1e-4, atol=1e-7)


def every_other(prompts, completion_ids, **_):
    """Different rewards for the completions of the first prompt only."""
    first = prompts[0]
    return [
        float(len(ids) + i) if p == first else 1.0
        for i, (p, ids) in enumerate(zip(prompts, completion_ids, strict=True))
    ]


def test_early_passes_go_back_outside_autocast(tmp_path):
    """As the last one does in the training loop: under autocast, products of the backward pass would be narrowed."""
    trainer = trainer_of(tmp_path, pass_tokens=1, bf16=True)
    flags = []
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda _: flags.append(torch.is_autocast_enabled("cpu")))
    trainer.train()
    assert len(flags) > 10 and not any(flags)


class Sizes(TorchDispatchMode):
    """Shapes of everything that is computed within the block, forward and backward."""

    def __init__(self):
        super().__init__()
        self.shapes = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.shapes |= {tuple(t.shape) for t in tree_flatten(result)[0] if isinstance(t, torch.Tensor)}
        return result


def test_training_never_touches_the_vocabulary(tmp_path):
    trainer = trainer_of(tmp_path, moved=True)
    trainer.model.train()
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    weight = trainer._head.weight
    loss = trainer._compute_loss(trainer.model, batch)
    with torch.no_grad():
        weight.fill_(torch.nan)  # neither its values are read
    with Sizes() as seen:
        again = trainer._compute_loss(trainer.model, batch)
        again.backward()
    assert torch.equal(loss, again) and torch.isfinite(again)
    assert len(seen.shapes) > 20
    assert not [shape for shape in seen.shapes if len(weight) in shape]  # nor anything of their number is made


def test_rows_of_a_group_share_a_micro_batch_and_nothing_gets_lost(tmp_path):
    trainer = trainer_of(tmp_path, gradient_accumulation_steps=4, per_device_train_batch_size=4)
    trainer.model.train()
    first = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    parts = trainer._buffered_inputs
    assert len(parts) == 4 and first is parts[0]
    assert [part["group"].unique().numel() for part in parts] == [1, 1, 1, 1]
    assert sum(len(part["group"]) for part in parts) == len(trainer.trace)
    for part in parts:
        for ids, mask, delta in zip(part["completion_ids"], part["completion_mask"].bool(), part["delta"], strict=True):
            length = int(mask.sum())
            assert any(
                torch.equal(ids[:length], drawn[:length]) and torch.equal(delta[:length], signal[:length])
                for drawn, signal in zip(trainer.trace.completion_ids, trainer.trace.delta, strict=True)
            )


def test_regrouping_keeps_rows_whole_lists_and_numbers_too():
    parts = [
        {
            "group": torch.tensor([1, 0]),
            "x": torch.tensor([[10.0], [0.0]]),
            "names": ["b", "a"],
            "count": torch.tensor(4),
        },
        {
            "group": torch.tensor([0, 1]),
            "x": torch.tensor([[1.0], [11.0]]),
            "names": ["c", "d"],
            "count": torch.tensor(4),
        },
    ]
    one, other = regrouped(parts)
    assert one["group"].tolist() == [0, 0] and other["group"].tolist() == [1, 1]
    assert one["x"].tolist() == [[0.0], [1.0]] and other["x"].tolist() == [[10.0], [11.0]]
    assert one["names"] == ["a", "c"] and other["names"] == ["b", "d"] and one["count"] == 4


def test_each_step_logs_where_its_time_went_and_the_peak_of_memory(tmp_path):
    trainer = trainer_of(tmp_path, max_steps=2, gradient_accumulation_steps=2)
    trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert len(lines) == 2
    for line in lines:
        parts = [line[f"seconds/{phase}"] for phase in ("sampling", "scoring", "update")]
        assert min(parts) > 0
        assert sum(parts) == pytest.approx(line["step_time"], rel=0.05)
        assert 100 < line["memory/peak_mib"] < 20_000


def test_the_clock_counts_nothing_twice():
    class Inner:
        model = None

        def __init__(self):
            self.now = 0.0

        def _generate_single_turn(self):
            self.now += 3.0

        def _generate_and_score_completions(self):
            self._generate_single_turn()
            self.now += 2.0

        def training_step(self):
            self._generate_and_score_completions()
            self.now += 5.0

    class Clocked(PhaseClock, Inner):
        pass

    from forklora.trainers import bridge

    clocked = Clocked()
    real, bridge.time.perf_counter = bridge.time.perf_counter, lambda: clocked.now
    try:
        clocked.training_step()
    finally:
        bridge.time.perf_counter = real
    assert clocked.phase_seconds == {"sampling": 3.0, "scoring": 2.0, "update": 5.0}


def test_a_pass_of_nothing_is_refused(tmp_path):
    with pytest.raises(ValueError, match="pass_tokens=0 must be at least 1"):
        trainer_of(tmp_path, pass_tokens=0)
