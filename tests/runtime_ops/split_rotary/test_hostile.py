"""Nodes of strangers: an error that names the node, or what the operator defines, and never a crash."""

from __future__ import annotations

from tests.native import needs_library
from tests.runtime_ops.split_rotary.honest import honest
from tests.runtime_ops.states import check_hostile

pytestmark = needs_library


def test_hostile_nodes_are_errors_that_name_the_node_or_have_a_result() -> None:
    check_hostile(honest())
