"""Sampling that was changed for one partition: over the settings, until it is reset.

The changes stand in the manifest of the partition's prompts, and are committed with them: a run
that fails changes nothing, and one that asks for nothing keeps what is there.
"""

import json
from collections.abc import Mapping
from typing import Any

from bulk_pipeline.spec import BulkInferenceSpec, SamplingSpec, change_sampling
from bulk_pipeline.storage.manifest import Manifest

CHANGES = "sampling_changes"  # in the meta of the prompts' manifest: value by name


def stored_changes(prompts: Manifest | None) -> dict[str, Any]:
    """What was changed for the partition, by name."""
    return prompts.meta.get(CHANGES, {}) if prompts else {}


def merge_changes(
    sampling: SamplingSpec, stored: Mapping[str, Any], new: Mapping[str, Any]
) -> dict[str, Any]:
    """The changes with new ones over them, as plain values.

    What is set to the value of the settings is a change no longer.

    Raises
    ------
    ValueError
        One line a problem, if they are not valid over the settings.
    """
    changes = {**stored, **new}
    values = change_sampling(sampling, changes).model_dump(mode="json", include=set(changes))
    settings = sampling.model_dump(mode="json")
    return {
        name: value for name, value in values.items() if name not in new or value != settings[name]
    }


def with_changes(spec: BulkInferenceSpec, changes: Mapping[str, Any]) -> BulkInferenceSpec:
    """The dataset's settings as they are for a partition.

    Raises
    ------
    ValueError
        One line, if the changes do not go with the settings any more.
    """
    if not changes:
        return spec
    try:
        sampling = change_sampling(spec.sampling, dict(changes))
    except ValueError as error:
        raise ValueError(
            f"{error}; its sampling was changed ({describe(differences(spec.sampling, changes))}): "
            "reset that, or set it again"
        ) from None
    return spec.model_copy(update={"sampling": sampling})


def differences(sampling: SamplingSpec, changes: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What differs from the settings: by name, ``{"value": ..., "settings": ...}``."""
    settings = sampling.model_dump(mode="json")
    return {
        name: {"value": value, "settings": settings[name]}
        for name, value in sorted(changes.items())
        if name in settings and value != settings[name]
    }


def changes_metadata(sampling: SamplingSpec, changes: Mapping[str, Any]) -> dict[str, str]:
    """What differs from the settings, where anything does, for the metadata of an asset."""
    found = differences(sampling, changes)
    return {"changed_sampling": describe(found)} if found else {}


def describe(found: Mapping[str, Mapping[str, Any]]) -> str:
    """`differences` in a line, such as ``temperature 0.2 (settings: 0.7)``."""
    return ", ".join(
        f"{name} {json.dumps(each['value'])} (settings: {json.dumps(each['settings'])})"
        for name, each in found.items()
    )
