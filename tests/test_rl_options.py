"""Options of the trainer: those that contradict the loss are refused by name, all others keep their meaning."""

import hashlib
import math

import pytest
import torch
from forklora.trainers.rl import ForkGRPOConfig, ForkGRPOTrainer
from peft import get_peft_model_state_dict
from trl import GRPOConfig

from forklora.adapter import KINDS, ForkLoraConfig
from tiny_policy import gradients, letters, llama, prompts, shorter, tokenizer, trainer_of

REFUSED = {
    "use_vllm": {"use_vllm": True},
    "use_transformers_continuous_batching": {"use_transformers_continuous_batching": True},
    "loss_type": {"loss_type": "cispo"},
    "num_iterations": {"num_iterations": 2},
    "steps_per_generation": {"steps_per_generation": 2},
    "beta": {"beta": 0.1},
    "delta": {"delta": 2.0},
    "importance_sampling_level": {"importance_sampling_level": "sequence"},
    "top_entropy_quantile": {"top_entropy_quantile": 0.5},
    "entropy_coef": {"entropy_coef": 0.1},
    "off_policy_mask_threshold": {"off_policy_mask_threshold": 0.5},
    "cache_implementation": {"cache_implementation": "static"},
    "generation_kwargs": {"generation_kwargs": {"num_beams": 2}},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_contradicts_the_centered_loss_is_refused_by_name_and_only_there(name, tmp_path):
    with pytest.raises(ValueError, match=rf"'sampler' does not go with .*{name}.*Take it out"):
        ForkGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, **REFUSED[name])
    ForkGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, score_centering="none", **REFUSED[name])


@pytest.mark.parametrize(
    "options, words",
    [
        ({"score_centering": "mean"}, "score_centering='mean' is not one of none, sampler, value"),
        ({"step_length": 0.0}, "step_length=0.0 must be above 0"),
        ({"step_length": math.inf}, "step_length=inf must be above 0"),
        ({"step_length": None, "step_kl": -1.0}, "step_kl=-1.0 must be above 0"),
        ({"step_length": math.nan}, "step_length=nan must be above 0"),
    ],
)
def test_values_outside_their_range_are_refused(options, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        ForkGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, **options)


def test_all_contradictions_are_named_at_once(tmp_path):
    with pytest.raises(ValueError, match="beta .*delta "):
        ForkGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, beta=0.1, delta=2.0)


class Untouchable(torch.nn.Module):
    """A model that nobody may look at before the arguments have been checked."""

    def __getattr__(self, name):
        raise AssertionError(f"the model was touched: {name}")


@pytest.mark.parametrize("part", ["tools", "rollout_func", "environment_factory"])
def test_tokens_of_others_are_refused_before_the_model_is_touched(part, tmp_path):
    args = ForkGRPOConfig(str(tmp_path), use_cpu=True, bf16=False)
    with pytest.raises(ValueError, match=f"does not go with {part}"):
        ForkGRPOTrainer(Untouchable(), shorter, args, peft_config=ForkLoraConfig(), **{part: [len]})


def test_a_foreign_configuration_is_refused(tmp_path):
    with pytest.raises(TypeError, match="args is a GRPOConfig; ForkGRPOTrainer takes a ForkGRPOConfig"):
        ForkGRPOTrainer(Untouchable(), shorter, GRPOConfig(str(tmp_path), use_cpu=True, bf16=False))


def test_bases_need_prompts(tmp_path):
    with pytest.raises(ValueError, match="without bases needs a train_dataset"):
        trainer_of(tmp_path, train_dataset=None)


def test_a_basis_for_the_head_is_refused_before_training(tmp_path):
    with pytest.raises(ValueError, match="lm_head is the embedding or the unembedding"):
        trainer_of(tmp_path, peft_config=ForkLoraConfig(target_modules=["q_proj", "lm_head"]))


def run(folder, **options):
    """A trainer after its steps, its adapter and what it logged at each step."""
    trainer = trainer_of(folder, **options)
    trainer.train()
    return trainer, state(trainer), [e for e in trainer.state.log_history if "reward" in e]


def state(trainer):
    return {n: t.clone() for n, t in get_peft_model_state_dict(trainer.model).items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def test_the_same_seed_gives_the_same_run(tmp_path):
    one, other = (run(tmp_path / name, max_steps=2)[1] for name in ("a", "b"))
    assert same(one, other)
    assert not same(one, run(tmp_path / "c", max_steps=2, seed=4)[1])


def test_several_rewards_are_weighed(tmp_path):
    both = {"reward": [shorter, letters]}
    trainer, moved, logged = run(tmp_path / "a", reward_weights=[0.0, 1.0], **both)
    assert {"rewards/shorter/mean", "rewards/letters/mean"} <= logged[0].keys()
    assert same(moved, run(tmp_path / "b", reward=letters)[1])
    assert not same(moved, run(tmp_path / "c", reward_weights=[1.0, 0.0], **both)[1])


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_every_scaling_of_rewards_scales_the_gradient_only_as_it_says(scale, tmp_path):
    trainer = trainer_of(tmp_path, scale_rewards=scale, moved=True)
    trainer.model.train()
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    reward = -0.25 * batch["completion_mask"].sum(1).float()
    group = torch.unique(batch["prompt_ids"], dim=0, return_inverse=True)[1]
    expected = torch.zeros(8)
    for g in group.unique():
        mine = group == g
        spread = {"group": reward[mine].std() + 1e-4, "batch": reward.std() + 1e-4, "none": 1.0}[scale]
        expected[mine] = (reward[mine] - reward[mine].mean()) / spread
    torch.testing.assert_close(batch["advantages"], expected, rtol=1e-3, atol=1e-4)
    found = gradients(trainer.model, trainer._compute_loss(trainer.model, batch))
    doubled = gradients(trainer.model, trainer._compute_loss(trainer.model, {**batch, "advantages": 2 * expected}))
    for one, other in zip(found, doubled, strict=True):
        torch.testing.assert_close(2 * one, other, rtol=1e-3, atol=1e-6)


def test_truncated_completions_can_be_left_out(tmp_path):
    trainer = trainer_of(tmp_path, mask_truncated_completions=True, moved=True, max_completion_length=3)
    trainer.model.train()
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    truncated = ~(batch["completion_ids"] == 1).any(1)
    assert 0 < int(truncated.sum()) < 8
    assert not batch["completion_mask"][truncated].any()
    found = gradients(trainer.model, trainer._compute_loss(trainer.model, batch))
    changed = {**batch, "advantages": torch.where(truncated, 50.0, batch["advantages"])}
    again = gradients(trainer.model, trainer._compute_loss(trainer.model, changed))
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))


def test_nothing_left_after_masking_is_a_zero_gradient(tmp_path):
    trainer = trainer_of(tmp_path, moved=True)
    trainer.model.train()
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    empty = {**batch, "completion_mask": torch.zeros_like(batch["completion_mask"])}
    loss = trainer._compute_loss(trainer.model, empty)
    assert torch.isfinite(loss)
    assert all(not g.any() for g in gradients(trainer.model, loss))


@pytest.mark.parametrize("centering", ["sampler", "value", "none"])
def test_conversations_train_as_their_rendered_text_does(centering, tmp_path):
    rendered = [
        {"prompt": tokenizer().apply_chat_template(p, tokenize=False, add_generation_prompt=True)}
        for p in prompts(chat=True)["prompt"]
    ]
    text = prompts().from_list(rendered)
    found = [
        run(tmp_path / name, reward=letters, score_centering=centering, train_dataset=data)[1]
        for name, data in (("chat", prompts(chat=True)), ("text", text))
    ]
    assert same(*found)


@pytest.mark.parametrize("centering", ["sampler", "value", "none"])
def test_stop_strings_end_a_completion(centering, tmp_path):
    stops = set("abcdefghij0123456789")
    options = {"generation_kwargs": {"stop_strings": sorted(stops)}, "max_completion_length": 12}
    trainer, _, _ = run(tmp_path, score_centering=centering, **options)
    rows = zip(trainer.trace.completion_ids, trainer.trace.completion_mask, strict=True)
    texts = [tokenizer().decode(ids[mask], skip_special_tokens=True) for ids, mask in rows]
    assert any(text[-1:] in stops for text in texts)
    assert not any(set(text[:-1]) & stops for text in texts)
    assert trainer.own_loss == (centering == "sampler")


def test_evaluation_changes_nothing_and_collects_nothing(tmp_path):
    trainer = trainer_of(tmp_path, eval_dataset=prompts(), per_device_eval_batch_size=8, max_steps=2, moved=True)
    before = state(trainer), {n: p.requires_grad for n, p in trainer.model.named_parameters()}
    bases, step = trainer.bases, trainer._step
    metrics = trainer.evaluate()
    assert math.isfinite(metrics["eval_loss"])
    assert metrics["eval_reward"] < 0
    assert same(before[0], state(trainer))
    assert before[1] == {n: p.requires_grad for n, p in trainer.model.named_parameters()}
    assert all(p.grad is None for p in trainer.model.parameters())
    assert trainer.bases is bases
    assert trainer._step == step


def test_evaluation_between_steps_leaves_the_trained_path_alone_but_for_the_draws(tmp_path):
    options = {"max_steps": 3, "max_completion_length": 4, "eval_dataset": prompts(count=4)}
    trainer, _, logged = run(tmp_path, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=4, **options)
    assert len(logged) == 3
    assert len([e for e in trainer.state.log_history if "eval_reward" in e]) == 3
    assert trainer._step == 3


@pytest.mark.parametrize(
    "optimizer",
    [
        {},
        {"step_length": None, "step_kl": 0.04},
        {"step_length": None, "optim": "adamw_torch", "learning_rate": 0.02},
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_continues_where_the_checkpoint_was(kind, optimizer, tmp_path):
    options = {"kind": kind, "save_strategy": "steps", "save_steps": 2, **optimizer}
    whole, end, logged = run(tmp_path, max_steps=4, **options)
    checkpoint = tmp_path / "checkpoint-2"
    again = trainer_of(tmp_path / "again", max_steps=4, **options)
    asked = {n for n, p in again.model.named_parameters() if p.requires_grad}
    again.train(resume_from_checkpoint=str(checkpoint))
    assert again.state.global_step == 4
    assert asked == {n for n, p in again.model.named_parameters() if p.requires_grad}
    kept = [e["reward"] for e in again.state.log_history if "reward" in e]
    assert kept == pytest.approx([e["reward"] for e in logged])
    found = state(again)
    for name, tensor in end.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)


def test_bases_do_not_move_the_random_state_of_the_run(tmp_path):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    args = ForkGRPOConfig(
        str(tmp_path), use_cpu=True, bf16=False, disable_tqdm=True, num_generations=4, basis_prompts=4
    )
    given = {"train_dataset": prompts(), "processing_class": tokenizer(), "peft_config": ForkLoraConfig()}
    bases = [ForkGRPOTrainer._collect(llama(), args, given) for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), before)
    first, second = (hashlib.sha256(b["model.layers.0.mlp.up_proj"].output.numpy().tobytes()) for b in bases)
    assert first.digest() == second.digest()
    assert bases[0].facts["prompts"] == "4"


def test_bases_come_from_prompts_as_the_chat_template_renders_them(tmp_path):
    given = {"train_dataset": prompts(chat=True), "processing_class": tokenizer(), "peft_config": ForkLoraConfig()}
    found = []
    for settings in (None, {"mood": "sad "}):
        quick = {"disable_tqdm": True, "num_generations": 4, "basis_prompts": 4, "chat_template_kwargs": settings}
        args = ForkGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, **quick)
        found.append(ForkGRPOTrainer._collect(llama(), args, given)["model.layers.0.mlp.up_proj"].output)
    assert not torch.allclose(*found)
