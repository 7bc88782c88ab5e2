"""Laws of the settings under DeepSpeed: what would lose steps without a word is refused by its key."""

import pytest
import torch
from forklora.trainers.rl import ForkGRPOTrainer
from forklora.trainers.settings import ForkGRPOConfig
from peft import LoraConfig, get_peft_model

from tiny_policy import llama, prompts, shorter, tokenizer, trainer_of

ENGINE = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}}


@pytest.mark.parametrize(
    ("engine", "options", "words"),
    [
        ({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, {}, "optimizer: .* take the section out"),
        ({"bf16": {"enabled": True}}, {"bf16": True}, "bf16.enabled: .* stays in float32"),
        ({"bf16": {"enabled": "auto"}}, {"bf16": True}, "bf16.enabled: .* stays in float32"),
        ({}, {"bf16": True}, "bf16.enabled: .* stays in float32"),
        ({"gradient_clipping": 1.0}, {"max_grad_norm": 1.0}, "gradient_clipping=1.0: .* set it to 'auto' or 0"),
        ({"zero_optimization": {"stage": 3}}, {"ds3_gather_for_generation": False}, "leave it True"),
    ],
)
def test_a_deepspeed_configuration_that_cannot_work_is_refused_by_its_key(engine, options, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        ForkGRPOConfig(str(tmp_path), use_cpu=True, deepspeed=ENGINE | engine, **options)


def test_under_deepspeed_nothing_is_narrowed_and_no_step_of_fixed_length_is_clipped(tmp_path):
    for given in ({}, {"gradient_clipping": "auto", "bf16": {"enabled": "auto"}}):
        args = ForkGRPOConfig(str(tmp_path), use_cpu=True, deepspeed=ENGINE | given)
        found = args.deepspeed_plugin.deepspeed_config
        assert found["gradient_clipping"] == 0.0 and not found.get("bf16", {}).get("enabled") and args.bf16 is False
    free = ForkGRPOConfig(
        str(tmp_path), use_cpu=True, step_length=None, deepspeed=ENGINE | {"gradient_clipping": "auto"}
    )
    assert free.deepspeed_plugin.deepspeed_config["gradient_clipping"] == free.max_grad_norm == 1.0
    assert "gradient_clipping" not in ENGINE and free.zero_stage == 2


@pytest.mark.parametrize("options", [{}, {"step_length": None, "optim": "sgd"}])
def test_a_narrow_adapter_is_refused_with_plain_sgd(options, tmp_path):
    model = get_peft_model(llama(dtype=torch.bfloat16), LoraConfig(r=1), autocast_adapter_dtype=False)
    args = ForkGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, num_generations=4, **options)
    given = {"train_dataset": prompts(), "processing_class": tokenizer()}
    with pytest.raises(ValueError, match="autocast_adapter_dtype=True"):
        ForkGRPOTrainer(model, shorter, args, **given).create_optimizer()


def test_draws_depend_on_seed_step_and_place_only_not_on_random_states(tmp_path):
    first, second = (trainer_of(tmp_path / str(i)) for i in range(2))
    torch.manual_seed(1)
    one = [first._luck(4)(t) for t in range(3)]
    torch.manual_seed(2)
    assert all(torch.equal(n, second._luck(4)(t)) for t, n in enumerate(one))
    again = first._luck(4)
    assert not torch.equal(again(0), one[0])
    first.state.global_step = 1
    assert not torch.equal(first._luck(4)(0), one[0]) and not torch.equal(one[1], one[0])
