"""Reads resources of KServe by the models of its own client: `python kserve_models.py FILE`, where they are installed.

The models refuse a missing field, but know nothing of names that are none; so each is walked by its own tables.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import types
from pathlib import Path
from typing import Any

import yaml
from kubernetes import client

# `import kserve` would import a server.
_found = importlib.util.find_spec("kserve")
assert _found is not None
_package = types.ModuleType("kserve")
_package.__path__ = list(_found.submodule_search_locations or ())
sys.modules["kserve"] = _package
from kserve import models  # noqa: E402

_LIST, _DICT = re.compile(r"[lL]ist\[(.+)\]"), re.compile(r"[dD]ict[(\[]str, (.+)[)\]]")  # of two generators
_PLAIN: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "bool": (bool,),
    "float": (int, float),
    "object": (object,),
    "ResourceQuantity": (str, int),
}


def made(kind: str, value: Any, where: str) -> Any:
    """The value as its model; raises `ValueError` where it is none."""
    if match := _LIST.fullmatch(kind):
        if not isinstance(value, list):
            raise ValueError(f"{where} is no list")
        return [made(match[1], each, f"{where}[{number}]") for number, each in enumerate(value)]
    if match := _DICT.fullmatch(kind):
        return {key: made(match[1], each, f"{where}.{key}") for key, each in value.items()}
    if kind in _PLAIN:
        if not isinstance(value, _PLAIN[kind]):
            raise ValueError(f"{where} is {value!r}, and must be of the type {kind}")
        return value
    model = getattr(models, kind, None) or getattr(client, kind, None)
    if model is None:
        raise ValueError(f"{where} has the type {kind}, which is not known here")
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {value!r}, and must be a {kind}")
    names = {name: attribute for attribute, name in model.attribute_map.items()}
    unknown = sorted(value.keys() - names.keys())
    if unknown:
        raise ValueError(f"{where} has {', '.join(unknown)}; a {kind} has {', '.join(sorted(names))}")
    fields = {
        names[name]: made(model.openapi_types[names[name]], each, f"{where}.{name}") for name, each in value.items()
    }
    return model(**fields)


def main() -> None:
    for resource in yaml.safe_load_all(Path(sys.argv[1]).read_text(encoding="utf-8")):
        group, _, version = resource["apiVersion"].partition("/")
        kind = f"{version.capitalize()}{resource['kind']}"
        made(kind, resource, resource["kind"])
        print(f"{group} {kind}")


if __name__ == "__main__":
    main()
