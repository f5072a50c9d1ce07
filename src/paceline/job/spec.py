"""Common base of a job's sections: strict keys, short forms, import paths and checked arguments."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, TypeAlias

from pydantic import BaseModel, ConfigDict, JsonValue, TypeAdapter, ValidationError, create_model, model_validator
from pydantic_core import ErrorDetails

from paceline.errors import InvalidValue, JobError, Problem
from paceline.extensions import ExtensionPoint
from paceline.text import nearest
from paceline.yaml_file import wrong_value

# keyword arguments for a user's or a built-in object; the values are plain, because a job can be written to a file
Args: TypeAlias = dict[str, JsonValue]


class Spec(BaseModel):
    """A section of a job, whose values are immutable. Unknown keys are errors.

    `short` names the field that a bare string sets. For example, `optimizer: adamw` means `optimizer: {name: adamw}`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)
    short: ClassVar[str | None] = None

    @model_validator(mode="before")
    @classmethod
    def _expand_short_form(cls, value: Any) -> Any:
        return cls.long_form(value)

    @classmethod
    def long_form(cls, value: Any) -> Any:
        """Expand a bare string to a mapping; return other values unchanged."""
        return {cls.short: value} if cls.short and isinstance(value, str) else value


@dataclass(frozen=True)
class JobSection:
    """A section of a job that another package defines.

    The fields of `spec` are the section's keys.
    """

    spec: type[Spec]


SECTIONS = ExtensionPoint[JobSection]("section of a job", "paceline.job_sections", JobSection, {}, JobError)


def read_sections(
    values: Mapping[str, Any], own: Mapping[str, object], context: Any
) -> tuple[dict[str, Any], list[ErrorDetails]]:
    """Validate the sections that other packages define.

    Args:
        values: the job as read from its file.
        own: the job's own keys, whose values are not changed.
        context: pydantic's validation context.

    Returns:
        The values, in which each valid section is an instance of its spec and invalid sections are missing, and the
        errors of the invalid sections.
    """
    whole = dict(values)
    errors: list[ErrorDetails] = []
    for key in [key for key in values if key not in own]:
        value = whole.pop(key)
        if not isinstance(key, str) or key not in SECTIONS:
            errors.append({"type": "extra_forbidden", "loc": (str(key),), "input": value, "msg": "unknown key"})
        elif value is not None:
            try:
                whole[key] = SECTIONS[key].spec.model_validate(value, context=context)
            except ValidationError as error:
                errors += [{**one, "loc": (key, *one["loc"])} for one in error.errors(include_url=False)]
    return whole, errors


def with_sections(job: type[BaseModel]) -> type[BaseModel]:
    """Return a job class that has the sections as fields, for messages about unknown keys."""
    fields: dict[str, Any] = {name: (section.spec | None, None) for name, section in SECTIONS.loadable()[0].items()}
    return create_model(job.__name__, __base__=job, **fields)


def load_object(path: str) -> Any:
    """Return the object that `pkg.mod:name` or `/abs/file.py:name` names.

    Modules in the current directory can be imported, as with `python -m`.

    Raises:
        JobError: the module, file or name does not exist, or the import raises an error.
    """
    module_name, _, name = path.rpartition(":")
    if module_name == "__main__":
        raise JobError(
            "job.object_of_script",
            "{path}: ranks cannot import an object that is defined in a notebook, a prompt or the running script. "
            "Put {name} into a file and name it as file.py:{name}",
            path=path,
            name=name,
        )
    try:
        module = _load_file(Path(module_name)) if module_name.endswith(".py") else _import_module(module_name)
    # a script may call `sys.exit`, which would end the run without an error message
    except (Exception, SystemExit) as error:
        explained = JobError(
            "job.import_failed",
            "{path}: cannot import {module!r}: {kind}: {error}",
            path=path,
            module=module_name,
            kind=type(error).__name__,
            error=error,
        )
        explained.from_users_code = True
        raise explained from error
    try:
        return functools.reduce(getattr, name.split("."), module)
    except AttributeError:
        public = sorted(key for key in vars(module) if not key.startswith("_"))
        raise JobError(
            "job.object_missing",
            "{path}: {module!r} has no {name!r}. {hint}",
            path=path,
            module=module_name,
            name=name,
            hint=nearest(name, public),
        ) from None


def resolve_import_path(path: str, context: Mapping[str, Any] | None) -> str:
    """Make the file in `file.py:name` absolute.

    A relative path is relative to the folder of the job file, or else to the current folder.

    Raises:
        ValueError: `path` is not an import path, or the file does not exist.
    """
    module, _, name = path.rpartition(":")
    if not module or not name:
        raise InvalidValue(
            "job.import_path_invalid", "{path!r} is not an import path. Write pkg.mod:name or file.py:name.", path=path
        )
    if not module.endswith(".py"):
        return path
    file = ((context or {}).get("base", Path.cwd()) / Path(module).expanduser()).resolve()
    if not file.is_file():
        raise InvalidValue("job.no_such_file", "no such file: {file}", file=file)
    return f"{file}:{name}"


def import_path_of(function_or_class: Any) -> str:
    """Return the import path with which every rank can import `function_or_class`.

    For an object that the running script defines, the import path is `/abs/script.py:name`.

    Raises:
        ValueError: the object cannot be imported, because it is a lambda, an instance, or defined inside a function or
            in an interactive session.
    """
    name, module = getattr(function_or_class, "__qualname__", None), getattr(function_or_class, "__module__", None)
    if name is None or module is None:
        raise InvalidValue(
            "job.not_importable",
            "{function_or_class!r} is neither a function nor a class. Give a function or class that creates it.",
            function_or_class=function_or_class,
        )
    if "<" in name:
        raise InvalidValue(
            "job.local_object",
            "other ranks cannot import {name}. Define it under its own name at module level.",
            name=name,
        )
    if module != "__main__":
        return f"{module}:{name}"
    main = sys.modules["__main__"]
    if main.__spec__ is not None:  # started with python -m pkg.mod
        return f"{main.__spec__.name}:{name}"
    # in a notebook, at a prompt, or in a script from a pipe
    if not Path(getattr(main, "__file__", None) or "").is_file():
        raise InvalidValue(
            "job.object_of_session",
            "{name} was defined in an interactive session, where other ranks cannot import it. Put it into a file.",
            name=name,
        )
    return f"{Path(str(main.__file__)).resolve()}:{name}"


def _import_module(name: str) -> ModuleType:
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    return importlib.import_module(name)


def _load_file(file: Path) -> ModuleType:
    file = file.resolve()
    for known in ("__main__", file.stem, _unique_name(file)):
        module = sys.modules.get(known)
        if module is not None and getattr(module, "__file__", None) and Path(str(module.__file__)).resolve() == file:
            return module
    name = _unique_name(file) if file.stem in sys.modules else file.stem
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # the processes of a DataLoader find the module under this name
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]  # the next import must not find an incomplete module
        raise
    return module


def _unique_name(file: Path) -> str:
    """Return a module name for a file whose own name is already in use.

    This happens, for example, for a second `model.py`.
    """
    return f"{file.stem}_{zlib.crc32(str(file).encode()):08x}"


def checked_args(what: str, built_in: Callable[..., Any], args: Mapping[str, Any]) -> dict[str, Any]:
    """Convert `args` to the parameter types of a built-in function or class.

    `what` names the function or class in messages, e.g. `model gpt`.

    Raises:
        JobError: arguments are unknown or have wrong values. The message lists all of them, with the nearest valid
            names.
    """
    parameters = inspect.signature(built_in, eval_str=True).parameters
    checked, wrong = {}, []
    for key, value in args.items():
        if key not in parameters:
            hint = nearest(key, parameters) if parameters else "It takes none."
            wrong.append(
                Problem(
                    "job.unknown_argument",
                    '{what} has no argument "{argument}". {hint}',
                    what=what,
                    argument=key,
                    hint=hint,
                )
            )
            continue
        try:
            checked[key] = TypeAdapter(parameters[key].annotation).validate_python(value)
        except ValidationError as error:
            wrong.append(wrong_value(f"{what}: {key}", error.errors()[0]))
    if wrong:
        raise JobError.of_problems(wrong)
    return checked


def check_call(path: str, users: Callable[..., Any], *positional: Any, **args: Any) -> None:
    """Check that a user's function or class accepts the arguments.

    Raises:
        JobError: the arguments do not fit the signature, which the message shows.
    """
    try:
        signature = inspect.signature(users)
    except ValueError:  # some classes written in C have no signature
        return
    try:
        signature.bind(*positional, **args)
    except TypeError as error:
        raise JobError(
            "job.args_do_not_fit",
            "{path}{signature} does not fit the job's args ({args}): {error}",
            path=path,
            signature=signature,
            args=", ".join(args) or "none",
            error=error,
        ) from None
