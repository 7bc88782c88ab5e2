"""Drift is zero where nothing was trained, grows where something was, and looking moves nothing of the training."""

import json

import pytest
import torch
from forklora.trainers.drift import DriftCallback, turned

from forklora.bases import BasisConfig, LayerBasis
from forklora.rollouts import Sampler
from tiny_policy import fingerprints, letters, prompts, tokenizer, trainer_of

FEW = BasisConfig(output=2, input=2, group=4, progress=False)


def callback(folder=None, *, every=1, count=8, share=0.01):
    texts, sampler = [p["prompt"] for p in prompts(count=count)], Sampler(max_new_tokens=4)
    return DriftCallback(tokenizer(), texts, sampler=sampler, every=every, folder=folder, collect=FEW, share=share)


def trained(folder, *callbacks, steps=3, reward=letters, **options):
    trainer = trainer_of(folder, reward=reward, bases="own", max_steps=steps, **options)
    for one in callbacks:
        trainer.add_callback(one)
    trainer.train()
    return trainer


def basis(output):
    return LayerBasis(output, torch.ones(1), torch.eye(4)[:, :1], torch.ones(1), 1.0, 1.0)


def test_turned_is_the_angle_by_layer():
    angle = torch.tensor(30.0).deg2rad()
    before = {"a": basis(torch.eye(3)[:, :1]), "b": basis(torch.eye(3)[:, 1:2])}
    after = {"a": basis(torch.tensor([[angle.cos()], [angle.sin()], [0.0]])), "b": before["b"]}
    assert turned(before, after) == pytest.approx(
        {"output_degrees": 15, "output_degrees_most": 30, "input_degrees": 0, "input_degrees_most": 0}, abs=1e-4
    )
    with pytest.raises(ValueError, match="no bases any more, such as b"):
        turned(before, {"a": before["a"]})


def test_the_first_look_finds_no_drift_and_training_some(tmp_path):
    drift = callback(tmp_path / "drift", every=2)
    trainer = trained(tmp_path / "run", drift, steps=4, step_length=0.5)
    assert [point["step"] for point in drift.curve] == [0, 2, 4]
    start, *_, end = drift.curve
    assert start["output_degrees"] == pytest.approx(0, abs=1e-3)
    assert start["span_degrees"] == pytest.approx(0, abs=1e-3) and end["span_degrees"] > 1
    assert start["top_kept"] == 1 and 0 < end["top_kept"] < 1 and drift.noise["top_kept"] < 1
    assert end["output_degrees"] > 1 and end["output_degrees_most"] >= end["output_degrees"]
    assert drift.noise["output_degrees"] > 0
    assert json.loads((tmp_path / "drift" / "drift.json").read_text()) == {"noise": drift.noise, "curve": drift.curve}
    assert len([entry for entry in trainer.state.log_history if "drift/output_degrees" in entry]) == 3


def test_looking_moves_nothing_of_the_training(tmp_path):
    plain, watched = trained(tmp_path / "a"), trained(tmp_path / "b", callback())
    assert fingerprints(plain.model) == fingerprints(watched.model)


def test_a_resumed_run_is_held_against_its_own_beginning(tmp_path):
    whole = callback()
    trained(tmp_path / "whole", whole, steps=4)
    saving = {"save_strategy": "steps", "save_steps": 2}
    trained(tmp_path / "run", callback(tmp_path / "drift"), steps=2, **saving)
    again = callback(tmp_path / "drift")
    trainer = trainer_of(tmp_path / "run", reward=letters, bases="own", max_steps=4, **saving)
    trainer.add_callback(again)
    trainer.train(resume_from_checkpoint=True)
    assert [point["step"] for point in again.curve] == [0, 1, 2, 3, 4]
    for mine, theirs in zip(again.curve, whole.curve, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-2)


def test_without_a_share_no_coordinates_are_looked_at_and_curves_of_both_kinds_are_not_mixed(tmp_path):
    plain = callback(tmp_path / "drift", share=None)
    trained(tmp_path / "run", plain, steps=1, save_strategy="steps", save_steps=1)
    assert all("top_kept" not in point for point in plain.curve)
    trainer = trainer_of(tmp_path / "run", reward=letters, bases="own", max_steps=2)
    trainer.add_callback(callback(tmp_path / "drift"))
    with pytest.raises(ValueError, match="holds a curve without largest coordinates: set share as there"):
        trainer.train(resume_from_checkpoint=True)


def test_senseless_settings_are_refused():
    with pytest.raises(ValueError, match="every=0"):
        callback(every=0)
    with pytest.raises(ValueError, match="there must be prompts"):
        callback(count=0)
    with pytest.raises(ValueError, match="share=0 must lie above 0"):
        callback(share=0)
