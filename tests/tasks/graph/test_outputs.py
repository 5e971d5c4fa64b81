"""Outputs are compared one by one."""

from __future__ import annotations

import numpy as np
import pytest

from graphopt.tasks.graph.outputs import class_axis, differences, figures_of, outputs_of

RANDOM = np.random.default_rng(0)


def test_each_output_has_its_own_figures() -> None:
    small, large = RANDOM.standard_normal((2, 5)).astype(np.float32) / 1e6, RANDOM.standard_normal((3, 4, 8, 8))
    label = np.arange(8)
    before = outputs_of([small, large, label, ["a"]], ["small", "large", "label", "words"])
    assert list(before) == ["small", "large", "label"]
    after = outputs_of([small * 1.1, large, np.where(label == 3, 9, label)], ["small", "large", "label"])
    changes = differences([before], [after])
    # A small output beside a large one is not lost: its error is 10%, in one direction.
    assert changes["small"].relative_error == pytest.approx(0.1, rel=1e-6)
    assert changes["small"].cosine == pytest.approx(1)
    assert changes["small"].same_class == 1
    assert changes["large"].relative_error == 0
    assert changes["large"].same_class is None  # pictures are no classes
    assert changes["label"].same_numbers == 7 / 8
    figures = figures_of(changes)
    assert figures["relative_error"] == pytest.approx(0.1, rel=1e-6)
    assert (figures["same_numbers_share"], figures["same_class_share"], figures["outputs"]) == (7 / 8, 1, 3)
    assert figures["relative_error of large"] == 0


def test_classes_are_told_by_name_or_shape() -> None:
    arrays = [np.ones((1, 7, 3)), np.ones((1, 7, 3)), np.ones((4, 2)), np.ones((1, 5, 8, 8))]
    outputs = outputs_of(arrays, ["y", "token_logits", "z", "logits"])
    assert [class_axis(name, output) for name, output in outputs.items()] == [None, -1, -1, 1]


def test_classes_of_pixels_stand_on_the_second_axis() -> None:
    logits = np.zeros((1, 3, 2, 4))
    logits[:, 1] = 1
    new_logits = logits.copy()
    new_logits[0, 2, 0, 0] = 2  # one pixel of eight
    (difference,) = differences([outputs_of([logits], ["logits"])], [outputs_of([new_logits], ["logits"])]).values()
    assert difference.same_class == 7 / 8


def test_another_shape_is_a_difference_and_no_error() -> None:
    before, after = (outputs_of([np.ones((count, 4), np.float32)], ["boxes"]) for count in (3, 2))
    (difference,) = differences([before], [after]).values()
    assert not difference.has_same_shape
    assert difference.cosine == pytest.approx(np.sqrt(2 / 3))
    assert figures_of({"boxes": difference})["other_shapes"] == 1


def test_zeros_on_both_sides_are_equal() -> None:
    zeros = outputs_of([np.zeros((2, 3), np.float32)], ["y"])
    (zero_difference,) = differences([zeros], [zeros]).values()
    assert (zero_difference.cosine, zero_difference.relative_error) == (1, 0)
    unit_outputs = outputs_of([np.ones((2, 3), np.float32)], ["y"])
    (full_difference,) = differences([zeros], [unit_outputs]).values()
    assert full_difference.cosine == 0
    assert "relative_error" not in figures_of({"y": full_difference})  # infinite, and JSON has no such number
