"""The private parts of TRL and PEFT that we lean on are there and behave as relied on."""

import inspect
from types import SimpleNamespace

import pytest
import torch
from forklora.trainers import bridge
from forklora.trainers.bridge import SeamedGRPOTrainer, load_policy
from forklora.trainers.rl import ForkGRPOTrainer, accumulated_items
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import LoraLayer, LoraVariant
from peft.tuners.tuners_utils import (
    BaseTunerLayer,
    _get_in_out_features,
    _maybe_include_all_linear_layers,
    check_target_module_exists,
)
from transformers import Trainer
from transformers.pytorch_utils import Conv1D
from trl import GRPOTrainer
from trl.models.utils import unwrap_model_for_generation
from trl.trainer.utils import create_model_from_path, split_tensor_dict

from tiny_policy import adapted, gpt2, llama, tokenizer, trainer_of


def arguments(function):
    return list(inspect.signature(function).parameters)


def test_trl_draws_tokens_in_one_method_that_gets_ids_and_returns_ids_and_logprobs(tmp_path):
    assert arguments(GRPOTrainer._generate_single_turn)[:2] == ["self", "prompt_ids"]
    assert inspect.getsource(GRPOTrainer).count("def _generate_single_turn") == 1
    trainer = trainer_of(tmp_path, score_centering="none")
    prompt = tokenizer()("2 * 3 =")["input_ids"]
    theirs = GRPOTrainer._generate_single_turn(trainer, [prompt, prompt], None, {}, 2)
    recorded = trainer_of(tmp_path)
    ours = recorded._generate_single_turn([prompt, prompt], None, {}, 2)
    for ids, logprobs in (theirs, ours):
        assert len(ids) == 2
        assert all(isinstance(i, int) for row in ids for i in row)
        assert logprobs is None or [len(r) for r in logprobs] == [len(r) for r in ids]
    assert all(p <= 0 for row in ours[1] for p in row)
    assert not recorded.model.training or recorded.model.training == trainer.model.training


def test_the_scored_batch_is_a_dictionary_of_rows_that_is_shuffled_and_split_together(tmp_path):
    assert arguments(GRPOTrainer._generate_and_score_completions) == ["self", "inputs"]
    trainer = trainer_of(tmp_path, gradient_accumulation_steps=2, per_device_train_batch_size=4)
    trainer.model.train()
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    needed = {
        "prompt_ids",
        "prompt_mask",
        "completion_ids",
        "completion_mask",
        "advantages",
        "num_items_in_batch",
        "delta",
    }
    assert needed <= batch.keys()
    assert batch["advantages"].shape == (4,)
    assert batch["delta"].shape[:2] == batch["completion_ids"].shape
    # each row still carries the signal recorded for its own tokens
    trace = trainer.trace
    found = 0
    for ids, mask, delta in zip(batch["completion_ids"], batch["completion_mask"].bool(), batch["delta"], strict=True):
        length = int(mask.sum())
        fits = [
            i
            for i in range(len(trace))
            if int(trace.completion_mask[i].sum()) == length
            and torch.equal(trace.completion_ids[i, :length], ids[:length])
            and torch.equal(trace.delta[i, :length], delta[:length])
        ]
        found += bool(fits)
    assert found == 4


def test_a_batch_is_split_by_rows_without_touching_what_is_no_tensor_of_rows():
    halves = split_tensor_dict({"delta": torch.arange(8).view(4, 2), "count": torch.tensor(7.0)}, 2)
    assert torch.equal(halves[1]["delta"], torch.tensor([[4, 5], [6, 7]]))
    assert halves[0]["count"] == 7.0


def test_the_loss_is_one_method_of_model_and_batch(tmp_path):
    assert arguments(GRPOTrainer._compute_loss) == ["self", "model", "inputs"]
    trainer = trainer_of(tmp_path)
    seen = []
    trainer.policy_loss = lambda model, batch, rows: seen.append(rows) or model(batch["prompt_ids"]).logits.sum() * 0
    trainer.train()
    assert len(seen) == 1


def test_metrics_reach_the_log(tmp_path):
    trainer = trainer_of(tmp_path)
    assert set(trainer._metrics) == {"train", "eval"}
    trainer.train()
    logged = trainer.state.log_history[0]
    assert {"forks/share", "forks/spread", "forks/leak", "forks/carrying_rows"} <= logged.keys()
    assert 0 <= logged["forks/share"] <= 1
    assert 0 <= logged["forks/leak"] <= 1
    trainer.model.eval()
    trainer.metric("mine", 2.0)
    assert trainer._metrics["eval"]["mine"] == [2.0]


def test_the_trainer_keeps_step_tokenizer_and_ends(tmp_path):
    trainer = trainer_of(tmp_path)
    assert trainer._step == 0
    assert trainer._tokenizer is not None
    assert list(trainer.eos_token_ids) == [1]
    trainer.train()
    assert trainer._step == 1
    assert trainer.current_gradient_accumulation_steps == 1


def test_without_seams_the_trainer_is_trls_own(tmp_path):
    trainer = trainer_of(tmp_path, score_centering="none", max_steps=1)
    assert not trainer.recording
    assert not trainer.own_loss
    trainer.train()
    assert trainer.trace is None
    for seam, given in (("draw", [{}, {}]), ("policy_loss", [{}, {}]), ("passes", [{}])):
        with pytest.raises(NotImplementedError):
            getattr(SeamedGRPOTrainer, seam)(trainer, *given, **({"rows": None} if seam == "policy_loss" else {}))
    assert SeamedGRPOTrainer.finish_rollouts(trainer, {"a": 1}) == {"a": 1}


def test_what_dapo_divides_by_is_the_window_of_one_rank(tmp_path):
    trainer = trainer_of(tmp_path, gradient_accumulation_steps=4, steps_per_generation=4, per_device_train_batch_size=4)
    trainer.model.train()
    assert accumulated_items(trainer, {"num_items_in_batch": torch.tensor(40.0)}) == 40.0
    trainer.model.eval()
    assert accumulated_items(trainer, {"num_items_in_batch": torch.tensor(0.0)}) == 1.0
    assert trainer.accumulation == 1.0


def test_generation_unwraps_under_the_names_we_pass():
    assert {"gather_deepspeed3_params", "gradient_checkpointing_kwargs"} <= set(arguments(unwrap_model_for_generation))
    assert arguments(unwrap_model_for_generation)[:2] == ["model", "accelerator"]


def test_a_policy_by_name_is_loaded_as_trl_loads_it(tmp_path):
    llama().save_pretrained(tmp_path)
    states = SimpleNamespace(distributed_type="NO")
    settings = {"model_init_kwargs": {"dtype": "float32"}, "trust_remote_code": False, "deepspeed_plugin": None}
    args = SimpleNamespace(distributed_state=states, **settings)
    one, other = load_policy(str(tmp_path), args), create_model_from_path(str(tmp_path), dtype="float32")
    assert type(one) is type(other)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert args.model_init_kwargs == {"dtype": "float32"}


def test_a_policy_by_name_trains(tmp_path):
    llama(tied=False).save_pretrained(tmp_path / "model")
    like = trainer_of(tmp_path / "a")
    trainer = ForkGRPOTrainer(
        str(tmp_path / "model"), like.reward_funcs[0], like.args, train_dataset=like.train_dataset,
        processing_class=tokenizer(), peft_config=LoraConfig(r=1, target_modules="all-linear"),
    )  # fmt: skip
    trainer.train()
    assert trainer.state.global_step == 1


PRIVATE = (
    "_generate_single_turn", "_generate_and_score_completions", "_compute_loss", "_metrics", "_tokenizer",
    "_save_checkpoint", "_get_output_dir", "_load_from_checkpoint", "_save",
)  # fmt: skip


def test_the_bridge_names_every_private_part_it_touches():
    source = inspect.getsource(bridge)
    for name in PRIVATE:
        assert name in inspect.getdoc(bridge)
        assert hasattr(GRPOTrainer, name) or f".{name}" in inspect.getsource(GRPOTrainer)
    assert "create_model_from_path" in source


def test_a_checkpoint_is_written_under_the_folder_of_its_step_and_old_ones_go_last():
    """What sealing relies on: the folder's name, and that nothing else deletes an older checkpoint."""
    source = inspect.getsource(Trainer._save_checkpoint)
    assert "self._get_output_dir(trial=trial)" in source and "PREFIX_CHECKPOINT_DIR}-{self.state.global_step}" in source
    assert source.rindex("rotate_checkpoints(") > source.rindex("save_to_json")
    assert "self.args.save_total_limit" in source
    assert arguments(Trainer._save)[1:] == ["output_dir", "state_dict"]
    assert arguments(Trainer._load_from_checkpoint)[1:] == ["resume_from_checkpoint", "model"]


def test_transformers_leaves_frozen_factors_out_of_what_it_saves_under_zero_3():
    """The reason for a saving of our own; where this changes, it may go."""
    assert "exclude_frozen_parameters=True" in inspect.getsource(Trainer.save_model)


def test_pefts_functions_for_targets_answer_as_its_injection_does():
    for make in (llama, gpt2):
        chosen = _maybe_include_all_linear_layers(LoraConfig(target_modules="all-linear"), make())
        asked = {n for n, _ in make().named_modules() if check_target_module_exists(chosen, n)}
        model = get_peft_model(make(), LoraConfig(target_modules="all-linear", fan_in_fan_out=make is gpt2))
        built = {n.removeprefix("base_model.model.") for n, m in model.named_modules() if isinstance(m, LoraLayer)}
        assert asked == built


def test_peft_gives_sizes_in_the_order_in_out():
    assert _get_in_out_features(torch.nn.Linear(3, 5)) == (3, 5)
    assert _get_in_out_features(Conv1D(5, 3)) == (3, 5)


def test_peft_freezes_what_a_layer_declares_frozen_and_forgets_it_with_the_adapter():
    assert BaseTunerLayer.frozen_peft_weight_names == {}
    model, _ = adapted("span")
    layers = [m for m in model.modules() if isinstance(m, LoraLayer)]
    assert {tuple(layer.frozen_peft_weight_names["default"]) for layer in layers} == {("lora_B",)}
    assert BaseTunerLayer.frozen_peft_weight_names == {}
    model.add_adapter("plain", LoraConfig(target_modules="all-linear"))
    model.delete_adapter("default")
    assert all("default" not in layer.frozen_peft_weight_names for layer in layers)


def test_peft_variants_are_made_of_the_methods_we_fill():
    for name, expected in {
        "forward": ["module", "active_adapter", "x", "result", "kwargs"],
        "merge_safe": ["module", "active_adapter", "orig_weight"],
        "merge_unsafe": ["module", "active_adapter", "orig_weight"],
        "unmerge": ["module", "active_adapter", "orig_weight"],
    }.items():
        assert arguments(getattr(LoraVariant, name)) == expected
    assert arguments(LoraLayer.resolve_lora_variant) == ["self", "config", "kwargs"]
    assert arguments(LoraLayer.update_layer)[:5] == ["self", "adapter_name", "r", "lora_alpha", "config"]
    assert "_register_custom_module" in vars(LoraConfig)
    source = inspect.getsource(LoraLayer.update_layer)
    assert source.index(".init(self") > source.index("_move_adapter_to_device_of_base_layer")
