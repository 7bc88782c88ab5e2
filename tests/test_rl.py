"""The trainer on tiny real policies: it learns, its gradient is the right one, and nothing else moves."""

import pytest
import torch
from forklora.trainers.rl import ForkGRPOConfig
from peft import LoraConfig, get_peft_model_state_dict
from trl import GRPOTrainer

from forklora.adapter import KINDS, ForkLoraConfig
from forklora.optim import StepLengthSGD
from tiny_policy import (
    fingerprints,
    gradients,
    letters,
    llama,
    random_bases,
    settings,
    shorter,
    trainable,
    trainer_of,
)  # fmt: skip

LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo")


def mean_length(trainer):
    return float(trainer.trace.completion_mask.sum(1).float().mean())


def adapter_of(trainer):
    return {n: t.clone() for n, t in get_peft_model_state_dict(trainer.model).items()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_length_reward_moves_the_sampler_and_leaves_the_base_alone(kind, tmp_path):
    trainer = trainer_of(tmp_path, kind=kind, max_steps=12, step_length=0.6, per_device_train_batch_size=32)
    start, before = adapter_of(trainer), fingerprints(trainer.model)
    trainer.train()
    lengths = [e["completions/mean_length"] for e in trainer.state.log_history if "reward" in e]
    assert len(lengths) == 12
    assert sum(lengths[-3:]) / 3 < 0.6 * lengths[0]
    # the rollouts recorded last came from the trained adapter
    assert mean_length(trainer) == pytest.approx(lengths[-1])
    assert any(not torch.equal(start[n], t) for n, t in adapter_of(trainer).items())
    assert fingerprints(trainer.model) == before
    assert (tmp_path / "bases.safetensors").exists()


def test_the_opposite_reward_moves_it_the_other_way(tmp_path):
    trainer = trainer_of(
        tmp_path, reward=lambda **k: [-r for r in shorter(**k)], max_steps=12, step_length=0.6,
        per_device_train_batch_size=32,
        max_completion_length=24,
    )  # fmt: skip
    trainer.train()
    lengths = [e["completions/mean_length"] for e in trainer.state.log_history if "reward" in e]
    assert sum(lengths[-3:]) / 3 > 1.5 * lengths[0]


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo"])
def test_the_gradient_does_not_depend_on_the_split(loss_type, tmp_path):
    found = []
    for size, steps in ((8, 1), (4, 2), (2, 4), (1, 8)):
        trainer = trainer_of(
            tmp_path, loss_type=loss_type, per_device_train_batch_size=size, gradient_accumulation_steps=steps,
            scale_rewards="none", max_steps=1, step_length=None, optim="sgd", learning_rate=1.0, max_grad_norm=0.0,
        )  # fmt: skip
        trainer.train()
        found.append(adapter_of(trainer))
    assert any(t.abs().max() > 1e-3 for n, t in found[0].items() if "lora_A" in n)
    for other in found[1:]:
        for name, tensor in found[0].items():
            torch.testing.assert_close(other[name], tensor, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("loss_type", LOSSES)
@pytest.mark.parametrize("kind", ["span", "block"])
def test_on_policy_the_centered_gradient_is_that_of_trls_own_loss(kind, loss_type, steps, tmp_path):
    trainer = trainer_of(
        tmp_path, kind=kind, loss_type=loss_type, gradient_accumulation_steps=steps, temperature=0.8, moved=True
    )
    batch, theirs, ours = both_gradients(trainer)
    assert float(batch["advantages"].abs().max()) > 0.1
    one, other = (torch.cat([g.flatten() for g in found]) for found in (theirs, ours))
    assert one.norm() > 1e-4
    assert torch.nn.functional.cosine_similarity(one, other, dim=0) > 0.9999
    torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-3 * float(one.abs().max()))


def both_gradients(trainer):
    """A batch of the trainer's own rollouts, TRL's gradient on it, and ours."""
    trainer.model.train()
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    found = []
    for own in (False, True):
        trainer.own_loss = own
        found.append(gradients(trainer.model, trainer._compute_loss(trainer.model, batch)))
    return batch, *found


@pytest.mark.parametrize(
    "truncation", [{"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2}], ids=lambda truncation: next(iter(truncation))
)
def test_under_truncated_sampling_the_gradient_is_that_of_the_sampler(truncation, tmp_path):
    trainer = trainer_of(tmp_path, moved=True, **truncation)
    batch, theirs, ours = both_gradients(trainer)
    trace = trainer.trace
    assert float(trace.leak.max()) < 1 - 1e-3
    assert trainer._sampler.pipeline()
    # TRL scores the whole softmax, which is not what was drawn from: the two must differ
    one, other = (torch.cat([g.flatten() for g in found]) for found in (theirs, ours))
    assert torch.nn.functional.cosine_similarity(one, other, dim=0) < 0.9999
    assert torch.isfinite(other).all()


def test_a_repetition_penalty_is_part_of_what_is_recorded(tmp_path):
    trainer = trainer_of(tmp_path, repetition_penalty=1.8, moved=True, max_completion_length=12)
    _, _, ours = both_gradients(trainer)
    assert all(torch.isfinite(g).all() for g in ours)
    assert trainer.trace.facts["repetition_penalty"] == "1.8"


@pytest.mark.parametrize("checkpointing", [{"use_reentrant": False}, {"use_reentrant": True}])
def test_checkpointing_gives_the_same_gradient(checkpointing, tmp_path):
    found = []
    for on in (False, True):
        trainer = trainer_of(
            tmp_path, moved=True, gradient_checkpointing=on, gradient_checkpointing_kwargs=checkpointing if on else None
        )
        found.append(both_gradients(trainer)[2])
    assert max(float(g.abs().max()) for g in found[0]) > 1e-4
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)


def test_value_is_trls_loss_with_the_prefix_average_taken_off(tmp_path):
    options = {"score_centering": "value", "scale_rewards": "none", "loss_type": "dr_grpo"}
    trainer = trainer_of(tmp_path, moved=True, per_device_train_batch_size=16, num_generations=8, **options)
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    assert batch["advantages"].shape == batch["completion_ids"].shape
    mask = batch["completion_mask"].bool()
    reward = -0.25 * mask.sum(1).float()
    group = torch.unique(batch["prompt_ids"], dim=0, return_inverse=True)[1]
    own = reward - torch.stack([reward[group == g].mean() for g in group])
    expected = own[:, None].expand(mask.shape).clone()
    for i, t in mask.nonzero().tolist():
        shared = (batch["completion_ids"][:, :t] == batch["completion_ids"][i, :t]).all(1)
        same = shared & mask[:, t] & (group == group[i])
        same[i] = False
        expected[i, t] -= own[same].mean() if same.any() else 0.0
    torch.testing.assert_close(batch["advantages"][mask], expected[mask], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(expected[mask], own[:, None].expand(mask.shape)[mask])
    trainer.model.train()
    theirs = GRPOTrainer._compute_loss(trainer, trainer.model, {**batch, "advantages": expected})
    ours = trainer._compute_loss(trainer.model, batch)
    for one, other in zip(gradients(trainer.model, ours), gradients(trainer.model, theirs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("centering", ["sampler", "value", "none"])
def test_equal_rewards_change_nothing(centering, tmp_path):
    trainer = trainer_of(
        tmp_path, reward=lambda completions, **_: [0.5] * len(completions), score_centering=centering, max_steps=2
    )
    start = adapter_of(trainer)
    trainer.train()
    assert all(torch.equal(start[n], t) for n, t in adapter_of(trainer).items())
    logged = [e for e in trainer.state.log_history if "reward" in e]
    assert [e["grad_norm"] for e in logged] == [0.0, 0.0]
    if centering == "sampler":
        assert [e["forks/carrying_rows"] for e in logged] == [0.0, 0.0]
    assert all(torch.isfinite(torch.tensor(e["loss"])) for e in logged)


def test_a_step_with_signal_changes_every_layer_by_the_stated_length_together(tmp_path):
    trainer = trainer_of(tmp_path, max_steps=1, step_length=0.25, lora_alpha=6, bases="own")
    trainer.train()
    assert isinstance(trainer.optimizer.optimizer, StepLengthSGD)
    moved = [m.get_delta_weight("default") for m in trainer.model.modules() if hasattr(m, "get_delta_weight")]
    assert all(float(d.norm()) > 0 for d in moved)
    assert float(sum(d.square().sum() for d in moved).sqrt()) == pytest.approx(0.25, rel=1e-4)


@pytest.mark.parametrize("adapter", ["lora", "none"])
def test_any_other_adapter_or_none_trains_too(adapter, tmp_path):
    config = LoraConfig(r=2, target_modules="all-linear") if adapter == "lora" else None
    trainer = trainer_of(tmp_path, peft_config=config, max_steps=2)
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    trainer.train()
    changed = {n for n, p in trainer.model.named_parameters() if not torch.equal(p, before[n])}
    asked = {n for n, p in trainer.model.named_parameters() if p.requires_grad}
    assert changed
    assert changed <= asked
    assert trainer.bases is None
    if adapter == "lora":
        assert trainable(trainer.model) == {"lora_A.weight", "lora_B.weight"}


@pytest.mark.parametrize("optim", ["sgd", "adamw_torch"])
def test_without_a_step_length_the_optimizer_is_trls(optim, tmp_path):
    trainer = trainer_of(tmp_path, step_length=None, optim=optim, learning_rate=0.01, max_steps=1)
    start = adapter_of(trainer)
    trainer.train()
    assert type(trainer.optimizer.optimizer).__name__.lower() == optim.partition("_")[0]
    assert any(not torch.equal(start[n], t) for n, t in adapter_of(trainer).items())


def test_bases_that_are_given_are_used_and_none_are_collected(tmp_path):
    bases = random_bases(llama())
    config = ForkLoraConfig(**settings("span", bases=bases))
    trainer = trainer_of(tmp_path, peft_config=config)
    assert trainer.bases is None
    assert not (tmp_path / "bases.safetensors").exists()
    name = "model.layers.0.mlp.up_proj"
    slot = trainer.model.get_submodule(f"base_model.model.{name}").lora_B["default"]
    assert torch.equal(slot.weight, bases[name][0][:, :2])


def test_the_letters_reward_is_never_without_signal(tmp_path):
    trainer = trainer_of(tmp_path, reward=letters, max_steps=1)
    trainer.train()
    assert trainer.state.log_history[0]["reward_std"] > 0


def test_the_defaults_are_the_documented_ones(tmp_path):
    args = ForkGRPOConfig(str(tmp_path), use_cpu=True)
    assert (args.score_centering, args.step_length, args.step_evenly) == ("sampler", 0.1, True)
    assert args.step_kl is None
    assert (args.basis_prompts, args.gradient_checkpointing) == (64, False)


def test_a_step_of_stated_length_is_refused_where_the_optimizer_sees_pieces(tmp_path):
    trainer = trainer_of(tmp_path, max_steps=1)
    trainer.is_fsdp_enabled = True
    with pytest.raises(ValueError, match="a stated step needs every matrix whole"):
        trainer.create_optimizer()
