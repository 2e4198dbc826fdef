"""Prepares an image set as array_record files, or says in one message what stands in the way."""

import contextlib
import dataclasses
import hashlib
import io
import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import absl.logging
import requests
import tensorflow_datasets as tfds
from tensorflow_datasets.core.download.download_manager import NonMatchingChecksumError

from experiments.errors import UserError

PROBE_SECONDS = 5.0
"""How long a host may take to answer. TFDS itself would wait for 205 s."""


@dataclasses.dataclass(frozen=True)
class Source:
    """Where an image set comes from.

    Attributes:
        builder_class: the TFDS builder that prepares and reads it.
        num_examples: examples in each split, checked after reading, so that a part of the set is
            never mistaken for the whole.
        find_local_files: returns whether the builder finds its files outside the data directory.
        hint: another way to get the set, for the message that a host cannot be reached.
    """

    builder_class: type[tfds.core.GeneratorBasedBuilder]
    num_examples: Mapping[str, int]
    find_local_files: Callable[[], bool] = lambda: False
    hint: str = ""


def prepare(
    source: Source, data_dir: Path, *, report: Callable[[str], None] = lambda message: None
) -> tfds.core.GeneratorBasedBuilder:
    """Prepares the set in `data_dir` unless it is there already.

    Args:
        source: the set.
        data_dir: TFDS data directory. Archives fetched by hand are looked for under
            `downloads/manual` in it.
        report: called with a line on what is being done, when it takes time.

    Returns:
        A builder whose `as_data_source` reads the set.

    Raises:
        UserError: where the set is in another format or damaged, its host cannot be reached, an
            archive is not the expected one, or `data_dir` cannot be written.
    """
    builder_class = source.builder_class
    prepared_dir = data_dir / builder_class.name / str(builder_class.VERSION)
    if prepared_dir.exists():
        _check_prepared(prepared_dir)
        return builder_class(data_dir=data_dir)
    urls = dict(builder_class.url_infos or {})
    if urls and not source.find_local_files():
        _check_reachable(source, data_dir, urls)
    report(f"preparing {builder_class.name} in {prepared_dir}")
    # TFDS's own messages say the same at greater length, or advise to install OpenCV.
    tfds.disable_progress_bar()
    absl.logging.set_verbosity(absl.logging.ERROR)
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        builder = builder_class(data_dir=data_dir, file_format="array_record")
        with contextlib.redirect_stdout(io.StringIO()):
            builder.download_and_prepare(
                download_config=tfds.download.DownloadConfig(
                    manual_dir=data_dir / "downloads" / "manual", try_download_gcs=False
                )
            )
    except (
        requests.RequestException,
        tfds.download.DownloadError,
        NonMatchingChecksumError,
    ) as error:
        raise UserError(
            f"The download of {builder_class.name} failed: {_first_line(error)}\n"
            "Run again to start it anew."
        ) from error
    except OSError as error:
        raise UserError(
            f"{builder_class.name} cannot be prepared in {data_dir}: {_first_line(error)}\n"
            "Free some space, make the directory writable, or choose another one with --data-dir."
        ) from error
    return builder


def _check_prepared(prepared_dir: Path) -> None:
    info_path = prepared_dir / "dataset_info.json"
    try:
        file_format = json.loads(info_path.read_text()).get("fileFormat", "tfrecord")
    except (OSError, ValueError) as error:
        raise UserError(
            f"The prepared set in {prepared_dir} is damaged: {info_path.name} cannot be read "
            f"({_first_line(error)}).\nMove that directory away and run again to prepare it anew."
        ) from error
    if file_format != "array_record":
        raise UserError(
            f"The prepared set in {prepared_dir} is in {file_format} format, and only array_record "
            "can be read by index.\nMove that directory away and run again to prepare it anew, or "
            "choose another one with --data-dir."
        )


def _check_reachable(source: Source, data_dir: Path, urls: Mapping[str, Any]) -> None:
    manual_dir = data_dir / "downloads" / "manual"
    missing = {}
    for url, url_info in urls.items():
        path = manual_dir / url_info.filename
        if path.exists():
            _check_archive(path, url, url_info)
        else:
            missing[url] = path
    if not missing:
        return
    reason = _probe(next(iter(missing)))
    if reason is None:
        return
    downloads = "\n".join(f"  {url}\n    as {path}" for url, path in missing.items())
    raise UserError(
        f"{source.builder_class.name} is not in {data_dir}, and {reason}.\n"
        f"Download on a machine that can, put it where it is looked for, and run again:\n"
        f"{downloads}" + (f"\n{source.hint}" if source.hint else "")
    )


def _check_archive(path: Path, url: str, url_info: Any) -> None:
    """TFDS checks this too, but only says so in a traceback."""
    size = path.stat().st_size
    if size == url_info.size:
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == url_info.checksum:
                return
    raise UserError(
        f"{path} is not the expected archive: {size} bytes where {url_info.size} were expected, or "
        f"another content (SHA-256 should be {url_info.checksum}).\n"
        f"Download {url} again, in full."
    )


def _probe(url: str) -> str | None:
    """Returns why `url` cannot be fetched, or None where it can."""
    host = urlsplit(url).hostname
    result = [f"{host} did not answer within {PROBE_SECONDS:g} s"]

    def fetch() -> None:
        # A real request, as a proxy may stand between here and the host.
        try:
            with requests.get(url, stream=True, timeout=PROBE_SECONDS) as response:
                status = response.status_code
        except requests.RequestException as error:
            result[:] = [f"{host} cannot be reached ({type(error).__name__})"]
        else:
            result[:] = [] if status < 400 else [f"{host} answers with status {status}"]

    # In a thread, as the time that a name server takes cannot be limited.
    thread = threading.Thread(target=fetch, daemon=True)
    thread.start()
    thread.join(PROBE_SECONDS)
    return result[0] if result else None


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0] or type(error).__name__
