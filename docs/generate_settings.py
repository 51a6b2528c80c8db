# SPDX-License-Identifier: Apache-2.0
"""Writes docs/settings.md from the model of the block: ``make docs``."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ds_fuyou.config import FuyouConfig, PlanOverrides, ResidentShares
from ds_fuyou.ds_json import SUPPORTED_OPTIMIZERS, refused_combinations

TARGET = Path(__file__).with_name("settings.md")

HEAD = """\
# Settings

Everything ds_fuyou reads is in the top-level block `"fuyou"` of the DeepSpeed JSON. This page is
generated from `ds_fuyou/config.py` by `make docs`; a test fails when it is out of date.

The smallest block is

```json
"fuyou": { "enabled": true, "nvme_path": ["/nvme0/swap", "/nvme1/swap"] }
```

- A missing or null block, or `"enabled": false`, leaves DeepSpeed as if the package were not installed.
- Every key accepts `"auto"`, which means its default. Where the default is `"auto"`, the plan decides. For `resume`
  alone it is a value of its own.
- Bytes are whole numbers or text: `"64GB"` is 64·10⁹, `"64GiB"` is 64·2³⁰.
- Unknown keys and wrong values are errors that name the full path, what was found, and the nearest key.
"""

PLAN_HEAD = """\
## fuyou.plan

Expert values. `fuyou.plan` is an object with any of these keys, or the path of a JSON file holding one.
Each overrides one value of the plan; the others stay planned. It may also be a plan document
([planner.md](planner.md)): then its `settings` are these values, and its placement is used where the block says
`"auto"`.
"""

AROUND = """\
## The rest of the DeepSpeed JSON

- `zero_optimization.stage` must be 3.
- `offload_optimizer` and `offload_param` may stay as they are. Their `nvme_path` is used where the block
  names none, their `device` (`cpu`, `nvme`) is the tier where the block says `"auto"`, `pin_memory` is
  honoured. Their other keys, and the section `aio`, have no effect and are listed once in the log.
- `optimizer.type`: {optimizers}.

These cannot be combined with the block and are refused by name:

{refused}

## Environment

| variable | meaning |
|---|---|
| `DS_FUYOU_DISABLE=1` | switches the package off in the process |
| `DS_FUYOU_LOG_LEVEL` | `debug`, `info` (default), `warning` or `error` |
| `FUYOU_CACHE` | the compiled core and profiles; default `~/.cache/ds_fuyou`, without a home in `$TMPDIR` |
| `DS_FUYOU_PROFILES` | directory of the profiles of runs alone; `off` keeps none |
| `CXX`, `MAX_JOBS` | compiler of the core, and how many run at a time |
| `TORCH_DEVICE_BACKEND_AUTOLOAD=0` | torch loads no plugins; use `deepspeed --module ds_fuyou SCRIPT` |
"""


def sections(model: type[BaseModel], path: str) -> Iterator[tuple[str, type[BaseModel]]]:
    """The model and those of its nested objects, the plan excepted, with their dotted paths."""
    yield path, model
    for name, field in model.model_fields.items():
        nested = field.annotation
        if isinstance(nested, type) and issubclass(nested, BaseModel):
            yield from sections(nested, f"{path}.{name}")


def table(model: type[BaseModel]) -> str:
    """A Markdown table of the plain keys of `model`."""
    lines = ["| key | values | default | meaning |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            continue
        lines.append(f"| `{name}` | {values(field)} | {default(field)} | {field.description} |")
    return "\n".join(lines) + "\n"


def default(field: FieldInfo) -> str:
    """The default as JSON would write it; keys without one are planned."""
    if field.default is None:
        return "–"
    return f"`{str(field.default).lower() if isinstance(field.default, bool) else field.default}`"


def values(field: FieldInfo) -> str:
    """What the key accepts besides an "auto" that means the default, in words or as a list of literals."""
    text = [_kind(part) for part in _parts(field.annotation) if part is not type(None)]
    has_own = "`auto`" in text and field.default not in (None, "auto")
    return ", ".join(dict.fromkeys(word for word in text if word != "`auto`" or has_own)) or "`auto`"


def _parts(annotation: object) -> Iterator[object]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        for part in typing.get_args(annotation):
            yield from _parts(part)
    elif typing.get_origin(annotation) is typing.Annotated:
        yield from _parts(typing.get_args(annotation)[0])
    elif typing.get_origin(annotation) is typing.Literal:
        yield from typing.get_args(annotation)
    else:
        yield annotation


def _kind(part: object) -> str:
    if part is bool:
        return "`true`, `false`"
    if part in (int, float):
        return "number"
    if part is str:
        return "path"
    if part is PlanOverrides:
        return "object, path"
    if part is ResidentShares:
        return "object"
    if typing.get_origin(part) is tuple:
        return "path, list of paths"
    if typing.get_origin(part) is list:
        return "list of whole numbers" if "int" in str(part) else "list of names"
    return f"`{part}`"


def render() -> str:
    """The whole page."""
    pages = [HEAD]
    for path, model in sections(FuyouConfig, "fuyou"):
        summary = (model.__doc__ or "").strip()
        pages.append(f"## {path}\n\n{summary}\n\n{table(model)}")
    pages.append(f"{PLAN_HEAD}\n{table(PlanOverrides)}")
    summary = (ResidentShares.__doc__ or "").strip().replace("\n    ", "\n")
    pages.append(f"## fuyou.plan.residency\n\n{summary}\n\n{table(ResidentShares)}")
    refused = "\n".join(f"- `{key}`: {reason}" for key, reason in refused_combinations())
    optimizers = ", ".join(f"`{name}`" for name in SUPPORTED_OPTIMIZERS)
    pages.append(AROUND.format(optimizers=optimizers, refused=refused))
    return "\n".join(pages)


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
