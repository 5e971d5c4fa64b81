"""The sandbox in which chat templates run: jinja2 with the options and helpers that transformers 5.23 gives it.

Source: ``transformers/utils/chat_template_utils.py``, whose renderings the tests compare with.
"""

from __future__ import annotations

import importlib
import json
from datetime import datetime
from typing import Any

from graphopt.errors import MissingDependencyError


def import_jinja2() -> Any:
    """Return the module ``jinja2``.

    Raises:
        MissingDependencyError: it is not installed, or older than 3.1.6, whose sandbox has no known escapes.
    """
    try:
        jinja2 = importlib.import_module("jinja2")
        for part in ("sandbox", "ext"):
            importlib.import_module(f"jinja2.{part}")
        old = tuple(int(number) for number in jinja2.__version__.split(".")[:3]) < (3, 1, 6)
    except ImportError as error:
        raise MissingDependencyError(
            "chat templates need jinja2, which is not installed", remedy='pip install "graphopt[chat]"'
        ) from error
    if old:
        raise MissingDependencyError(
            f"chat templates need jinja2 3.1.6 or newer, and this is {jinja2.__version__}",
            remedy='pip install "graphopt[chat]"',
        )
    return jinja2


def environment(jinja2: Any) -> Any:
    """Return the environment that templates are compiled in.

    Args:
        jinja2: the module, as from :func:`import_jinja2`.
    """

    class Generation(jinja2.ext.Extension):  # type: ignore[misc]
        """``{% generation %}``, by which templates mark the model's own words for training: its text as it is."""

        tags = frozenset({"generation"})

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body).set_lineno(line)

    class Namespace(jinja2.utils.Namespace):  # type: ignore[misc]
        """A namespace that refuses names with an underscore in front, which lead to Python's internals."""

        def __init__(*args: Any, **names: Any) -> None:
            attributes = dict(*args[1:], **names)
            for name in attributes:
                _check_name(jinja2, name)
            jinja2.utils.Namespace.__init__(args[0], attributes)

        def __setitem__(self, name: str, value: Any) -> None:
            _check_name(jinja2, name)
            jinja2.utils.Namespace.__setitem__(self, name, value)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    jinja_environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    jinja_environment.filters["tojson"] = _tojson
    jinja_environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": _Dict(),
        "namespace": Namespace,
    }
    return jinja_environment


class _Dict:
    """``dict`` without its attributes."""

    def __call__(self, *args: Any, **items: Any) -> dict[Any, Any]:
        return dict(*args, **items)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """See ``dict.fromkeys``."""
        return dict.fromkeys(*args)


def _check_name(jinja2: Any, name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot have an attribute {name!r}")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON; jinja2's own filter escapes what HTML does not allow."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
