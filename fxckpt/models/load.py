"""A model and a batch, from a model type, a folder, or a function in a file."""

from __future__ import annotations

import contextlib
import copy
import difflib
import importlib
import importlib.util
import inspect
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fxckpt.errors import SettingsError
from fxckpt.models.spec import ModelSpec
from fxckpt.models.tasks import Batch, Task, find_task, task_of_code

_FUNCTION = re.compile(r"(?P<file>.+\.py):(?P<function>\w+)")
_SHAPE = "(model, batch): a torch.nn.Module and a dict of its keyword arguments"


def load(spec: ModelSpec, *, shapes: bool = False) -> tuple[nn.Module, Batch]:
    """The model in training mode and its batch, on the device, the same ones at every call.

    Args:
        spec: which.
        shapes: build a transformers model without memory for its weights, on the ``meta`` device.

    Raises:
        SettingsError: there is no such model, or a setting does not fit it.
    """
    function = _FUNCTION.fullmatch(spec.model)
    path = Path(spec.model)
    if function:
        if spec.overrides:
            raise SettingsError(f"--set changes a transformers configuration; {spec.model} has none.")
        model, batch = _from_function(spec, Path(function["file"]), function["function"])
    elif path.is_dir() or path.suffix == ".json":
        model, batch = _from_file(spec, path / "config.json" if path.is_dir() else path, shapes)
    elif len(path.parts) > 1 or path.suffix:
        raise SettingsError(f"There is no folder {spec.model!r}. Give a folder, a model type, or file.py:function.")
    else:
        model, batch = _from_type(spec, spec.model, {}, None, shapes)
    moved = {name: _moved(value, spec) for name, value in batch.items()}
    return (model if shapes else model.to(spec.device)).train(), moved


def _moved(value: Any, spec: ModelSpec) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.to(spec.device, dtype=spec.torch_dtype if value.is_floating_point() else None)


# --- from a function --------------------------------------------------------------------------------------------------


def _from_function(spec: ModelSpec, file: Path, name: str) -> tuple[nn.Module, Batch]:
    if not file.is_file():
        raise SettingsError(f"There is no file {str(file)!r}.")
    sys.path.insert(0, str(file.resolve().parent))  # as when the file is run, so that it finds its neighbours
    found = importlib.util.spec_from_file_location(file.stem, file)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[file.stem] = module
    found.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise SettingsError(f"{file.name} has no function {name!r}.")
    offered = {"batch": spec.batch, "seq": spec.seq, "dtype": spec.torch_dtype or torch.float32, "device": spec.device}
    takes = inspect.signature(function).parameters
    torch.manual_seed(spec.seed)
    made = function(**{key: value for key, value in offered.items() if key in takes})
    if not isinstance(made, tuple) or len(made) != 2:
        raise SettingsError(f"{name} in {file.name} must return {_SHAPE}; it returns a {type(made).__name__}.")
    model, batch = made
    if not isinstance(model, nn.Module) or not isinstance(batch, Mapping):
        given = f"({type(model).__name__}, {type(batch).__name__})"
        raise SettingsError(f"{name} in {file.name} must return {_SHAPE}; it returns {given}.")
    if spec.torch_dtype is not None and "dtype" not in takes:
        model = model.to(dtype=spec.torch_dtype)
    return model, dict(batch)


# --- from transformers ------------------------------------------------------------------------------------------------


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise SettingsError(
            f"A model type or a folder needs transformers ({error}): pip install 'fxckpt[transformers]', "
            "or give a file.py:function."
        ) from error


def _from_file(spec: ModelSpec, file: Path, shapes: bool) -> tuple[nn.Module, Batch]:
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
        model_type = fields.pop("model_type")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise SettingsError(
            f"{spec.model} is no model: {file.name} with a model_type in it cannot be read "
            f"({type(error).__name__}: {error})."
        ) from error
    architectures = fields.get("architectures") or [None]
    for drop in ("dtype", "torch_dtype", "quantization_config", "transformers_version"):
        fields.pop(drop, None)  # the element type is the one asked for
    code = fields.pop("auto_map", None)
    if code and spec.trust_remote_code:
        return _from_code(spec, file.parent, fields, code, shapes)
    return _from_type(spec, model_type, fields, architectures[0], shapes, has_code=bool(code))


def _from_code(
    spec: ModelSpec, folder: Path, fields: dict[str, Any], code: Mapping[str, str], shapes: bool
) -> tuple[nn.Module, Batch]:
    """A model whose code lies beside its configuration."""
    transformers, task = _transformers(), task_of_code(code)
    where = str(folder.resolve())
    try:
        config_class = type(transformers.AutoConfig.from_pretrained(where, trust_remote_code=True))
    except (OSError, ImportError, ValueError) as error:
        raise SettingsError(f"The code beside {folder / 'config.json'} cannot be loaded: {error}") from error
    config = _config(config_class, {**fields, "auto_map": dict(code)}, spec)
    config.name_or_path = where
    return _built(spec, config, task, shapes)


def _from_type(
    spec: ModelSpec,
    model_type: str,
    fields: dict[str, Any],
    architecture: str | None,
    shapes: bool,
    has_code: bool = False,
) -> tuple[nn.Module, Batch]:
    transformers = _transformers()
    known = list(transformers.CONFIG_MAPPING)
    if model_type not in known and has_code:
        raise SettingsError(
            f"{spec.model} has code of its own for its model type {model_type!r}, and it is not run unless you say so: "
            "read it, then give --trust-remote-code."
        )
    if model_type not in known:
        close = difflib.get_close_matches(model_type, known, n=3)
        hint = f" Did you mean {' or '.join(close)}?" if close else ""
        raise SettingsError(
            f"transformers {transformers.__version__} has no model type {model_type!r}.{hint} "
            "Give a model type, a folder with config.json, or file.py:function."
        )
    config = _config(transformers.CONFIG_MAPPING[model_type], fields, spec)
    return _built(spec, config, find_task(transformers, config, architecture), shapes)


def _built(spec: ModelSpec, config: Any, task: Task, shapes: bool) -> tuple[nn.Module, Batch]:
    auto = getattr(_transformers(), task.auto)
    batch = task.batch(config, spec, torch.Generator().manual_seed(spec.seed + 1))
    if not shapes:
        _refuse_too_large(auto, config, spec)
    torch.manual_seed(spec.seed)
    with torch.device("meta") if shapes else contextlib.nullcontext():
        model = auto.from_config(
            config, trust_remote_code=spec.trust_remote_code, dtype=spec.torch_dtype or torch.float32
        )
    if not spec.dropout:
        _zero_rates(model)
    return model, batch


def _config(config_class: Any, fields: dict[str, Any], spec: ModelSpec) -> Any:
    """A configuration with the overrides in it, and without what makes no sense in training."""
    default = config_class(**copy.deepcopy(fields))
    _refuse_unknown(default, spec.overrides, config_class.model_type)
    merged = _merged(fields, {"use_cache": False} if hasattr(default, "use_cache") else {})
    config = config_class(**_merged(merged, spec.overrides))
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0  # else labels cannot be shifted
    if not spec.dropout:
        for part in (config, *(v for v in vars(config).values() if hasattr(v, "model_type"))):
            for name in [n for n, value in vars(part).items() if _is_rate(n, value)]:
                setattr(part, name, 0.0)
    return config


def _merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = copy.deepcopy(dict(under))
    for key, value in over.items():
        inner = merged.get(key)
        merged[key] = _merged(inner, value) if isinstance(inner, dict) and isinstance(value, Mapping) else value
    return merged


def _refuse_unknown(config: Any, overrides: Mapping[str, Any], model_type: str, prefix: str = "") -> None:
    """A misspelt field, which transformers takes in silence, would benchmark another model than was meant."""
    for key, value in overrides.items():
        if not hasattr(config, key):
            names = [*vars(config), *getattr(config, "attribute_map", {})]
            close = difflib.get_close_matches(key, [n for n in names if not n.startswith("_")], n=3)
            hint = f" Did you mean {' or '.join(prefix + c for c in close)}?" if close else ""
            raise SettingsError(f"--set {prefix}{key}: the configuration of {model_type!r} has no such field.{hint}")
        inner = getattr(config, key)
        if isinstance(value, Mapping) and hasattr(inner, "model_type"):
            _refuse_unknown(inner, value, model_type, f"{prefix}{key}.")


def _is_rate(name: str, value: Any) -> bool:
    return "drop" in name and isinstance(value, float)


def _zero_rates(model: nn.Module) -> None:
    """Dropout rates that a model has beside its configuration."""
    for module in model.modules():
        if isinstance(module, nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d):
            module.p = 0.0
        for name in [n for n, value in vars(module).items() if _is_rate(n, value)]:
            setattr(module, name, 0.0)


def _refuse_too_large(auto: Any, config: Any, spec: ModelSpec) -> None:
    """Default configurations are those of full-size models: say so before the machine runs out of memory."""
    free = _free_bytes()
    try:
        with torch.device("meta"):
            shapes = auto.from_config(copy.deepcopy(config), trust_remote_code=spec.trust_remote_code)
    except (RuntimeError, NotImplementedError):  # it reads values while it is built
        return
    size = (spec.torch_dtype or torch.float32).itemsize
    needed = 2 * size * sum(p.numel() for p in shapes.parameters())
    if free is not None and needed > free:
        raise SettingsError(
            f"{config.model_type!r} needs {needed / 2**30:.1f} GiB for weights and gradients in each process, and "
            f"{free / 2**30:.1f} GiB are free: make it smaller, such as by --set num_hidden_layers=4."
        )


def _free_bytes() -> int | None:
    """Free memory of the machine in bytes, caches that can be dropped included; None where it cannot be read."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None
