"""Laws of the adapter in a DeepSpeed engine: in every stage the gradients and steps it has without one."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from forklora.bases import BasisConfig, collect_bases
from forklora.export import save_plain_lora
from forklora.forward import Calls
from forklora.gathering import partitioned, whole
from forklora.rollouts import Sampler
from forklora.slots import put_bases
from forklora.unembed import read_unembedding, unwrap
from ranks import engine, together
from tiny_policy import FORMS, adapted, llama, loss_of, random_bases, shake, tokens

pytest.importorskip("deepspeed")

SOME = [("span", False), ("inputs", False), ("core", True), ("block", False)]


def net(kind, trained, *, bases=0, dtype=torch.float32):
    model = llama(tied=False, dtype=dtype)
    drawn = random_bases(model, seed=bases)
    return adapted(kind, model=model, bases=drawn, train_basis=trained, lora_alpha=3)[0]


def numbers(model):
    """Everything of the adapter, whole, by name."""
    ours = {n: p for n, p in [*model.named_parameters(), *model.named_buffers()] if "lora_" in n}
    with whole(*ours.values()):
        return {n: p.detach().clone() for n, p in ours.items()}


def gap(found, expected):
    """Largest difference, by the largest number."""
    assert found.keys() == expected.keys()
    size = max(float(t.abs().max()) for t in expected.values())
    return max(float((found[n] - expected[n]).abs().max()) for n in expected) / size


def full_gradients(running):
    from deepspeed.utils import safe_get_full_grad

    ours = {n: p for n, p in running.module.named_parameters() if p.requires_grad}
    return {n: safe_get_full_grad(p).clone() for n, p in ours.items()}


def plain_gradients(model):
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}


def apart(running, plain, ids):
    """Largest difference of the logits, by the largest of them, without gradients."""
    with torch.no_grad():
        found, expected = running(ids).logits, plain(ids).logits
    return float((found - expected).abs().max() / expected.abs().max())


def refusal(running):
    """What collecting bases on a running engine says."""
    sampler, config = Sampler(max_new_tokens=3), BasisConfig(output=2, input=2, group=4, progress=False)
    try:
        collect_bases(running, None, tokens().tolist(), config=config, sampler=sampler)
    except ValueError as error:
        return str(error)
    return ""


def tried(stages, forms):
    """Per stage and form: how far outputs, gradients and steps are from those of the plain model."""
    found = {}
    for stage in stages:
        for kind, trained in forms:
            plain, cut = (shake(net(kind, trained), size=0.1) for _ in range(2))
            running = engine(cut, stage)
            far = {"pieces": stage == 3 and not all(map(partitioned, cut.parameters()))}
            optimizer = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.1)
            far["alone"] = apart(unwrap(cut), plain, tokens())  # the first call of all, around the engine
            for step in range(3):
                ids = tokens(seed=step)
                optimizer.zero_grad()
                loss_of(plain, ids).backward()
                running.backward(loss_of(running, ids))
                far[f"gradient {step}"] = gap(full_gradients(running), plain_gradients(plain))
                running.step()
                optimizer.step()
                far[f"logits {step}"] = apart(running, plain, ids)
            far["adapter"] = gap(numbers(cut), numbers(plain))
            head = read_unembedding(running)  # checks itself against the model's logits
            far["head"] = float(
                (head.rows(tokens()[0]) - plain.get_output_embeddings().weight[tokens()[0]]).abs().max()
            )
            far["shares"] = (stage == 3) == Calls.of(running).shares_prompt
            said = refusal(running)
            far["collects"] = "ZeRO-3 engine" not in said if stage == 3 else said != ""
            found[f"{stage} {kind} {trained}"] = far
            running.destroy()
    return found


@pytest.mark.parametrize("stages, forms", [([3], SOME), pytest.param([0, 1, 2, 3], FORMS, marks=pytest.mark.slow)])
def test_outputs_gradients_and_steps_are_those_of_the_plain_model(stages, forms):
    for found in together(tried, stages=stages, forms=forms, timeout=500):
        assert len(found) == len(stages) * len(forms)
        for case, far in found.items():
            assert max(far.values()) < 1e-4, f"{case}: {far}"


def narrow():
    """A bfloat16 base with its float32 adapter under ZeRO-3, small parameters kept whole: DeepSpeed#8072."""
    plain, cut = (shake(net("core", False, dtype=torch.bfloat16), size=0.1) for _ in range(2))
    running = engine(cut, 3, zero_optimization={"stage": 3, "stage3_param_persistence_threshold": 100})
    for model, step in ((plain, None), (running, running.step)):
        loss = loss_of(model)
        loss.backward() if step is None else (running.backward(loss), step())
    with torch.no_grad():
        for parameter in plain.parameters():
            if parameter.requires_grad:
                parameter -= 0.1 * parameter.grad
    found, expected = numbers(cut), numbers(plain)
    kinds = {str(t.dtype) for t in found.values()} | {
        str(p.dtype) for n, p in cut.named_parameters() if "lora_" not in n
    }
    return {
        "gap": gap(found, expected),
        "dtypes": sorted(kinds),
        "step": gap(expected, numbers(shake(net("core", False), size=0.1))),
    }


@pytest.mark.slow
def test_a_bfloat16_base_keeps_its_float32_adapter_under_zero_3():
    for found in together(narrow):
        assert found["dtypes"] == ["torch.bfloat16", "torch.float32"]
        assert found["gap"] < 1e-2 * found["step"]


def again(folder, stages, forms):
    """Per stage and form: whether a checkpoint brings the adapter back bit for bit, and training on gives the same."""
    found = {}
    for stage in stages:
        for kind, trained in forms:
            place = str(Path(folder, f"{stage}-{kind}-{trained}"))
            adam = {"optimizer": lambda trained: torch.optim.AdamW(trained, lr=0.01)}
            first = engine(shake(net(kind, trained)), stage, **adam)
            walk(first, steps=[0, 1])
            first.save_checkpoint(place)
            saved = numbers(first.module)
            walk(first, steps=[2])
            end = numbers(first.module)
            other = engine(net(kind, trained, bases=77), stage, **adam)
            put_bases(other.module, random_bases(llama(), seed=0))
            other.load_checkpoint(place)
            back = numbers(other.module)
            walk(other, steps=[2])
            found[f"{stage} {kind} {trained}"] = {
                "back": all(torch.equal(back[n], saved[n]) for n in saved),
                "on": all(torch.equal(t, end[n]) for n, t in numbers(other.module).items()),
                "moved": not all(torch.equal(saved[n], end[n]) for n in saved),
            }
            save_plain_lora(other.module, Path(folder, f"adapter-{stage}-{kind}-{trained}"))
            first.destroy()
            other.destroy()
    return found


def walk(running, *, steps):
    for step in steps:
        running.backward(loss_of(running, tokens(seed=step)))
        running.step()


@pytest.mark.slow
@pytest.mark.parametrize("stages, forms", [([0, 1, 2, 3], FORMS)])
def test_a_checkpoint_brings_the_adapter_back_bit_for_bit(stages, forms, tmp_path):
    first, second = together(again, folder=str(tmp_path), stages=stages, forms=forms, timeout=500)
    assert first == second
    for case, held in first.items():
        assert held == dict.fromkeys(held, True), case
    for kind, trained in forms:
        for stage in set(stages) & {0, 1, 2}:
            (place,) = Path(tmp_path, f"{stage}-{kind}-{trained}").glob("*/mp_rank_00_model_states.pt")
            names = torch.load(place, weights_only=False)["module"]
            assert {n.partition("lora_")[2] for n in names if "lora_" in n} == {"A.default.weight", "B.default.weight"}
        tensors = {
            stage: load_file(Path(tmp_path, f"adapter-{stage}-{kind}-{trained}", "adapter_model.safetensors"))
            for stage in stages
        }
        for stage in stages[1:]:
            assert gap(tensors[stage], tensors[stages[0]]) < 1e-5
