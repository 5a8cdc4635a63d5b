"""The definitions of a Dagster project; one file that cannot be loaded does not stop the others."""

import importlib
import os
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import click
import dagster as dg
import yaml
from pydantic import ValidationError

COMPONENT_FILES = ("defs.yaml", "component.yaml")


class WrongUseError(click.ClickException):
    """A command that cannot be meant so; exit code 2."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Loaded:
    """The definitions of a module.

    Attributes
    ----------
    bad
        Files that are left out, by the dataset's name: the file, and what is wrong, in one line.
    """

    module: str
    definitions: dg.Definitions
    bad: dict[str, str] = field(default_factory=dict)


def load_definitions(module: str) -> Loaded:
    """The Dagster definitions of a module, by its name.

    If they cannot be loaded, each file of the project's folder of definitions is loaded by
    itself, and the bad ones are left out.

    Raises
    ------
    ClickException
        One line, if it cannot be imported, raises, or has none.
    """
    sys.path.insert(0, os.getcwd())
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise WrongUseError(f"--module: cannot import {module}: {error}") from None
    try:
        definitions = _defs_of(loaded)
    except Exception as error:  # whatever a user's definitions raise
        reason = innermost_message(error)
    else:
        if not isinstance(definitions, dg.Definitions):
            raise WrongUseError(f"--module: {module} has no Definitions named defs; name one")
        return Loaded(module, definitions)
    bad: dict[str, str] = {}
    kept = dg.Definitions()
    try:  # not while the error is handled: it would stand behind those of the files
        kept = _load_apart(loaded, bad)
    except Exception:  # two files that do not go together
        bad.clear()
    if not bad:
        raise click.ClickException(f"--module: {module}: {reason}")
    return Loaded(module, kept, bad)


def _defs_of(module: ModuleType) -> object:
    found = getattr(module, "defs", None)
    return found() if callable(found) else found


def _load_apart(module: ModuleType, bad: dict[str, str]) -> dg.Definitions:
    """The definitions in the project's folder of them, without the files that are bad."""
    try:
        project = dg.ComponentTree.for_project(Path(str(module.__file__)))
    except Exception:  # of no Dagster project, and Dagster has no one error for it
        return dg.Definitions()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as Dagster does when it loads the folder
        return _load_folder(project.defs_module, project.project_root, bad)


def _load_folder(folder: ModuleType, root: Path, bad: dict[str, str]) -> dg.Definitions:
    tree = dg.ComponentTree.from_module(folder, root)
    path = tree.defs_module_path
    try:
        return tree.build_defs(path)
    except Exception as error:
        if file := next((path / name for name in COMPONENT_FILES if (path / name).exists()), None):
            bad[_dataset_name(file)] = f"{os.path.relpath(file)}: {innermost_message(error)}"
            return dg.Definitions()
    found = []
    for child in sorted(path.iterdir()):
        name = f"{folder.__name__}.{child.stem}"
        is_package = child.is_dir() and child.name.isidentifier() and child.name != "__pycache__"
        try:
            if is_package and any(child.iterdir()):
                found.append(_load_folder(importlib.import_module(name), root, bad))
            elif child.suffix == ".py" and child.stem != "__init__":
                loaded = importlib.import_module(name)
                definitions = _defs_of(loaded)
                if not isinstance(definitions, dg.Definitions):
                    definitions = dg.load_definitions_from_module(loaded)
                found.append(definitions)
        except Exception as error:
            bad[child.stem] = f"{os.path.relpath(child)}: {innermost_message(error)}"
    return dg.Definitions.merge(*found)


def _dataset_name(file: Path) -> str:
    """The name that a file gives its dataset; that of its folder, if it cannot be read."""
    try:
        return str(yaml.safe_load(file.read_text("utf-8"))["attributes"]["name"])
    except (yaml.YAMLError, ValueError, KeyError, TypeError):
        return file.parent.name


def innermost_message(error: BaseException) -> str:
    """The message at the bottom of a chain of exceptions, in one line."""
    while cause := error.__cause__ or (None if error.__suppress_context__ else error.__context__):
        error = cause
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        return f"line {error.problem_mark.line + 1}: {error.problem}; correct it"
    if isinstance(error, ValidationError):  # of what stands beside the attributes
        problems = [(".".join(map(str, each["loc"])), each["msg"]) for each in error.errors()]
        return "; ".join(f"{where}: {rule}" for where, rule in problems)
    text = str(error).partition("Stack Trace:")[0]  # which some of Dagster's messages hold
    lines = [" ".join(line.split()) for line in text.splitlines()]
    return "; ".join(line for line in lines if line) or repr(error)
