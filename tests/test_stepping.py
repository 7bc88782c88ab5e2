"""Steps of a stated size on real policies: the change asked for is the one that happens; looking leaves no trace."""

import pytest
import torch

from forklora.passes import joined
from forklora.state import adapter_tensors
from tiny_policy import fingerprints, letters, trainer_of


def changing(folder, kl=0.005, **options):
    return trainer_of(folder, step_length=None, step_kl=kl, reward=letters, bases="own", **options)


def logits_of(trainer, batch):
    """Logits at every drawn token, from whole rows in the plain way."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    width = batch["prompt_ids"].shape[1]
    with torch.no_grad():
        out = trainer.model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    return out[:, width - 1 : -1][batch["completion_mask"].bool()].double()


class Path:
    """Logits on one batch before and after the step that was made from it."""

    def __init__(self, trainer):
        self.trainer, self.before, self.batch = trainer, None, None
        inner = trainer.create_optimizer

        def create(*args, **kwargs):
            made = inner(*args, **kwargs)
            made.register_step_pre_hook(lambda *_: self.keep())
            return made

        trainer.create_optimizer = create

    def keep(self):
        self.batch = joined(self.trainer.window)
        self.before = logits_of(self.trainer, self.batch)

    def divergence(self):
        """KL(old | new) per drawn token, over the whole vocabulary."""
        old, new = self.before.log_softmax(-1), logits_of(self.trainer, self.batch).log_softmax(-1)
        return float((old.exp() * (old - new)).sum(-1).mean())


# the smallest is found in proportion to a hundredfold one
@pytest.mark.parametrize(("kl", "within"), [(0.0002, 0.25), (0.005, 0.1), (0.1, 0.1)])
@pytest.mark.parametrize("kind", ["span", "block"])
def test_a_step_has_the_divergence_that_was_asked_for(kind, kl, within, tmp_path):
    trainer = changing(tmp_path, kl, kind=kind, per_device_train_batch_size=32)
    path = Path(trainer)
    trainer.train()
    assert path.divergence() == pytest.approx(kl, rel=within)


@pytest.mark.parametrize("centering", ["value", "none"])
def test_the_divergence_does_not_depend_on_the_centering(centering, tmp_path):
    trainer = changing(tmp_path, score_centering=centering, per_device_train_batch_size=32)
    path = Path(trainer)
    trainer.train()
    assert path.divergence() == pytest.approx(0.005, rel=0.1)


def test_the_step_does_not_depend_on_micro_batches(tmp_path):
    weights = []
    for place, (rows, parts) in enumerate([(32, 1), (8, 4)]):
        trainer = changing(
            tmp_path / str(place), per_device_train_batch_size=rows, gradient_accumulation_steps=parts, max_steps=2
        )
        trainer.train()
        weights.append(adapter_tensors(trainer.model))
    for name, tensor in weights[0].items():
        assert torch.allclose(tensor, weights[1][name], rtol=1e-3, atol=1e-6)


def test_neither_alpha_nor_the_size_of_rewards_changes_the_step(tmp_path):
    lengths, policies = [], []
    for place, (alpha, gain) in enumerate([(2, 1.0), (6, 1.0), (2, 50.0)]):
        reward = lambda gain=gain, **k: [gain * r for r in letters(**k)]  # noqa: E731
        trainer = trainer_of(
            tmp_path / str(place), step_length=None, step_kl=0.005, reward=reward, bases="own", lora_alpha=alpha,
            scale_rewards="none",
        )  # fmt: skip
        path = Path(trainer)
        trainer.train()
        lengths.append(next(e["step/length"] for e in trainer.state.log_history if "step/length" in e))
        policies.append(logits_of(trainer, path.batch))
    for length, policy in zip(lengths, policies, strict=True):
        assert length == pytest.approx(lengths[0], rel=1e-4)
        assert torch.allclose(policy, policies[0], atol=1e-4)


@pytest.mark.parametrize(("length", "held"), [(1e-3, False), (1e3, True)])
def test_with_a_length_the_divergence_is_a_brake(length, held, tmp_path):
    trainer = trainer_of(
        tmp_path, step_length=length, step_kl=0.005, reward=letters, bases="own", per_device_train_batch_size=32
    )
    path = Path(trainer)
    trainer.train()
    taken = next(e["step/length"] for e in trainer.state.log_history if "step/length" in e)
    moved = [m.get_delta_weight("default").detach() for m in trainer.model.modules() if hasattr(m, "get_delta_weight")]
    assert float(sum(d.square().sum() for d in moved).sqrt()) == pytest.approx(taken, rel=1e-4)
    if held:
        assert taken < length
        assert path.divergence() == pytest.approx(0.005, rel=0.1)
    else:
        assert taken == length
        assert path.divergence() < 0.005


def test_looking_puts_everything_back_to_the_bit(tmp_path):
    trainer = changing(tmp_path)
    path, hidden, seen = Path(trainer), trainer.drawn_hidden, []

    def keep():
        seen.append((fingerprints(trainer.model), trainer.model.training, torch.get_rng_state().tolist()))

    def looking():
        if not seen:
            keep()
        return hidden()

    # kept before the first look, and by a hook that runs after the last one and before the step
    trainer.drawn_hidden, path.keep = looking, keep
    start = fingerprints(trainer.model)
    trainer.train()
    assert len(seen) == 2 and seen[0] == seen[1]
    assert seen[0][:2] == (start, True)


def test_an_error_while_looking_leaves_the_weights_as_they_were(tmp_path):
    trainer = changing(tmp_path)
    start, hidden, calls = fingerprints(trainer.model), trainer.drawn_hidden, []

    def failing():
        calls.append(None)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return hidden()

    trainer.drawn_hidden = failing
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.train()
    assert fingerprints(trainer.model) == start


def test_the_rate_falls_with_the_schedule(tmp_path):
    trainer = changing(tmp_path, 0.08, max_steps=4, lr_scheduler_type="linear", per_device_train_batch_size=16)
    trainer.train()
    rates = [e["learning_rate"] for e in trainer.state.log_history if "learning_rate" in e]
    lengths = [e["step/length"] for e in trainer.state.log_history if "step/length" in e]
    assert rates == pytest.approx([0.08, 0.06, 0.04, 0.02])
    assert lengths[-1] < lengths[0]


def test_without_a_signal_no_step_is_taken_and_nothing_is_looked_at(tmp_path):
    trainer = trainer_of(
        tmp_path, step_length=None, step_kl=0.005, reward=lambda completions, **_: [0.5] * len(completions)
    )
    start = fingerprints(trainer.model)
    trainer.train()
    assert fingerprints(trainer.model) == start
    assert not any("step/length" in e for e in trainer.state.log_history)
