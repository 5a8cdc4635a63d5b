"""Which partitions are missing or stale, and why: what is stored against source and settings.

Reads listings and manifests, a file's bytes only where its size or time has changed, and imports
no model library. A partition is done if running it again would change nothing.
"""

from typing import Any, cast

from bulk_pipeline.engine.adapter_files import found_fingerprints
from bulk_pipeline.engine.model_files import (
    device_extras,
    find_model,
    model_fingerprint,
    tokenizer_hash,
)
from bulk_pipeline.spec import BulkInferenceSpec, FilesSource, GeneratorSettings
from bulk_pipeline.stages.answers import answer_settings
from bulk_pipeline.stages.chat_template import chat_template_text
from bulk_pipeline.stages.format import prompt_inputs
from bulk_pipeline.stages.ingest import source_settings
from bulk_pipeline.stages.partitions import Slice, plan_partitions
from bulk_pipeline.stages.sampling_changes import stored_changes, with_changes
from bulk_pipeline.stages.sources import SourceFile, content_hash, file_system
from bulk_pipeline.storage.manifest import Manifest
from bulk_pipeline.storage.schemas import COMPLETIONS, OUTPUT, PROMPTS, RAW_DATASET, TABLES
from bulk_pipeline.storage.store import Store

HASHES_FILE = "source_hashes.json"  # of files whose time changed; saves reading them twice
MAX_HASH_BYTES = 1 << 30  # a larger file counts as changed by its time; reading it takes minutes
SOURCE_CHANGED = "source changed"  # starts a reason


def find_missing_or_stale(
    spec: BulkInferenceSpec,
    store: Store,
    settings: GeneratorSettings | None = None,
    plan: dict[str, Slice] | None = None,
) -> dict[str, str]:
    """Find the partitions that a run would change.

    Parameters
    ----------
    settings
        The model, where `spec` names a shared one; without it the model is not judged.
    plan
        The partitions to look at; all that the source has now by default.

    Returns
    -------
    dict
        The reason by partition key, in the plan's order: ``missing``, ``unfinished: <table>``,
        ``source changed: <files>``, ``settings changed: <names>``, ``model changed``,
        ``adapter changed: <names>``, or which
        table is older than another.
    """
    plan = plan_partitions(spec, store) if plan is None else plan
    judge = _Judge(spec, store, settings or spec.generator)
    found = store.read_many(judge.manifests, plan)
    reasons = {
        key: judge.reason(slice_, manifests)
        for (key, slice_), manifests in zip(plan.items(), found, strict=True)
    }
    return {key: reason for key, reason in reasons.items() if reason is not None}


def find_removed(store: Store, plan: dict[str, Slice]) -> list[str]:
    """Find partitions that have results but no longer a source; their results stay."""
    return sorted(set(store.partition_keys(OUTPUT)) - set(plan))


class _Judge:
    """Compares a partition's tables with each other, the source and the settings."""

    def __init__(self, spec: BulkInferenceSpec, store: Store, settings: GeneratorSettings | None):
        self.spec, self.store, self.settings = spec, store, settings
        self.hashes = _ContentHashes(spec, store)
        self.source_settings = source_settings(spec)
        self.folder = find_model(settings) if settings else None
        self.tokenizer_hash = tokenizer_hash(self.folder) if self.folder else None
        self.chat_template = (
            None
            if spec.prompt.chat_template == "model"  # then it is in the tokenizer's files
            else chat_template_text(spec.prompt, cast(Any, None))
        )
        self.fingerprints = self._fingerprints()
        self.adapters = found_fingerprints(settings) if settings else {}

    def _fingerprints(self) -> set[str]:
        """The model's fingerprints on the devices that it may run on."""
        if self.settings is None or self.folder is None:
            return set()
        on_cpu = {"cpu": [True], "cuda": [False], "auto": [True, False]}[self.settings.device]
        return {
            model_fingerprint(self.folder, device_extras(self.settings, each)) for each in on_cpu
        }

    def manifests(self, key: str) -> dict[str, Manifest | None] | str:
        """A partition's manifests by table, or what is wrong with one of them."""
        try:
            return {table: self.store.partition(table, key).manifest() for table in TABLES}
        except ValueError as error:
            return str(error)

    def reason(self, slice_: Slice, found: dict[str, Manifest | None] | str) -> str | None:
        if isinstance(found, str):
            return found
        if not any(found.values()):
            return "missing"
        unfinished = [table for table, manifest in found.items() if not _is_complete(manifest)]
        if unfinished:
            return f"unfinished: {unfinished[0]}"
        manifests = cast(dict[str, Manifest], found)
        return (
            self._source_reason(manifests[RAW_DATASET], slice_)
            or self._prompts_reason(manifests[PROMPTS], manifests[RAW_DATASET])
            or self._completions_reason(manifests[COMPLETIONS], manifests[PROMPTS])
            or _older(manifests, OUTPUT, (RAW_DATASET, COMPLETIONS))
            or self._output_reason(manifests[OUTPUT])
        )

    def _source_reason(self, raw: Manifest, slice_: Slice) -> str | None:
        if isinstance(self.spec.source, FilesSource):
            changed = self._changed_files(raw.inputs.get("files", []), slice_.files)
            if changed:
                shown = ", ".join(changed[:5]) + (", ..." if len(changed) > 5 else "")
                return f"{SOURCE_CHANGED}: {shown}"
        recorded = raw.inputs.get("settings", self.source_settings)
        return _settings_reason(recorded, self.source_settings, "source.")

    def _changed_files(
        self, recorded: list[dict[str, Any]], files: tuple[SourceFile, ...]
    ) -> list[str]:
        """The files that are not as they were read: other bytes, other rows, more or fewer."""
        before = {_place(entry): entry for entry in recorded}
        now = {_place({"path": f.relative, "start": f.start, "stop": f.stop}): f for f in files}
        changed = {place[0] for place in before.keys() - now.keys()}
        if self.spec.source.limit is None:  # with a limit, the last files are not read
            changed |= {place[0] for place in now.keys() - before.keys()}
        changed |= {
            place[0]
            for place in before.keys() & now.keys()
            if not self.hashes.is_same(before[place], now[place])
        }
        return sorted(changed)

    def _prompts_reason(self, prompts: Manifest, raw: Manifest) -> str | None:
        if prompts.inputs.get("raw_parts") != [part.name for part in raw.parts]:
            return f"{PROMPTS} is older than {RAW_DATASET}"
        settings = self.settings or GeneratorSettings(model="")
        try:
            spec = with_changes(self.spec, stored_changes(prompts))
        except ValueError as error:
            return str(error)
        expected = prompt_inputs(
            spec, settings, raw, self.tokenizer_hash or "", self.chat_template or ""
        )
        del expected["raw_parts"], expected["raw_epoch"]
        unknown = [
            *(["max_seq_len", "adapters"] if self.settings is None else []),
            *(["tokenizer"] if self.tokenizer_hash is None else []),
            *(["chat_template"] if self.chat_template is None else []),
        ]
        for name in unknown:
            expected.pop(name, None)
        return _settings_reason(prompts.inputs, expected)

    def _completions_reason(self, completions: Manifest, prompts: Manifest) -> str | None:
        if completions.inputs.get("prompts") != [part.name for part in prompts.parts]:
            return f"{COMPLETIONS} is older than {PROMPTS}"
        fingerprint = completions.inputs.get("model_fingerprint")
        is_other = self.fingerprints and fingerprint not in self.fingerprints
        if is_other:
            return "model changed"
        made_with = completions.inputs.get("adapters", {})
        changed = [name for name, now in self.adapters.items() if made_with.get(name, now) != now]
        return f"adapter changed: {', '.join(changed)}" if changed else None

    def _output_reason(self, output: Manifest) -> str | None:
        recorded, now = output.inputs.get("answers", {}), answer_settings(self.spec.output)
        names = [name for name in ("reasoning", "unfold") if recorded.get(name) != now.get(name)]
        return f"output settings changed: {', '.join(names)}" if names else None


def _is_complete(manifest: Manifest | None) -> bool:
    return manifest is not None and manifest.complete


def _older(manifests: dict[str, Manifest], table: str, upstream: tuple[str, ...]) -> str | None:
    for name in upstream:
        if manifests[table].inputs.get(name) != [part.name for part in manifests[name].parts]:
            return f"{table} is older than {name}"
    return None


def _settings_reason(
    recorded: dict[str, Any], expected: dict[str, Any], prefix: str = ""
) -> str | None:
    recorded = {name: value for name, value in recorded.items() if name in expected}
    names = _changed_names(recorded, expected, prefix)
    return f"settings changed: {', '.join(names)}" if names else None


def _changed_names(recorded: dict[str, Any], expected: dict[str, Any], prefix: str) -> list[str]:
    """Names whose values differ; what is off may be in one of the two only, and null."""
    names = []
    for name in sorted(recorded.keys() | expected.keys()):
        before, value = recorded.get(name), expected.get(name)
        if isinstance(before, dict) and isinstance(value, dict):
            names += _changed_names(before, value, f"{prefix}{name}.")
        elif before != value:
            names.append(prefix + name)
    return names


def _place(entry: dict[str, Any]) -> tuple[str, int, int | None]:
    """Which rows of which file: what the manifest of raw_dataset records of it."""
    return entry["path"], entry.get("start", 0), entry.get("stop")


class _ContentHashes:
    """Tells whether a file is as it was read: by its listing, else by the hash of its bytes."""

    def __init__(self, spec: BulkInferenceSpec, store: Store):
        self._source, self._store = spec.source, store
        self._stored: dict[str, list[str]] = store.read_json(HASHES_FILE) or {}

    def is_same(self, recorded: dict[str, Any], file: SourceFile) -> bool:
        if file.version and recorded.get("version") == file.version:
            return True
        if recorded.get("blake2b") is None or recorded["bytes"] != file.size:
            return False  # it was read in part, or is another
        if recorded["bytes"] > MAX_HASH_BYTES:
            return False
        return self._hash(file) == recorded["blake2b"]

    def _hash(self, file: SourceFile) -> str:
        version, digest = self._stored.get(file.relative, ["", ""])
        if version != file.version:
            assert isinstance(self._source, FilesSource)
            digest = content_hash(file_system(self._source)[0], file.path)
            self._stored[file.relative] = [file.version, digest]
            self._store.write_json(HASHES_FILE, self._stored)
        return digest
