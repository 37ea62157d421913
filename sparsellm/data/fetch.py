"""`sparsellm data fetch`: a local mirror of a corpus on the Hugging Face hub."""

from pathlib import Path

import yaml

from sparsellm.data.text.corpus import HubCorpus, corpus_path, load_corpus
from sparsellm.data.text.network import has_no_answer, one_line, with_retries
from sparsellm.data.text.token_shards import named_errors
from sparsellm.recipe.strict import load_yaml, validate

_PATIENCE = 8.0  # seconds


def fetch(name: str, folder: Path, num_shards: int | None, num_workers: int) -> Path:
    """Downloads the files of a corpus at its pinned revision, and writes a YAML that names them.

    Complete files are kept and partial ones continued, so an interrupted download resumes where it
    stopped. The mirror has the shards in the same order: the first ``num_shards`` training files
    (None: all), and the held-out ones. Returns the YAML file, for `data.corpus`.

    Raises:
        FileNotFoundError, ValueError, ConnectionError: the corpus does not exist or is not on the
            hub, or the hub cannot be reached.
    """
    from huggingface_hub import HfApi, snapshot_download

    path = corpus_path(name)
    content = load_yaml(path)
    if content.get("source") != "hub":
        raise ValueError(
            f"{path}: its source is {content.get('source')!r}; only hub corpora can be fetched"
        )
    config = validate(HubCorpus, content, path)
    try:  # whoever waits at a terminal should not wait for retries without a network
        HfApi().dataset_info(config.repo, revision=config.revision, timeout=_PATIENCE)
    except Exception as error:
        if has_no_answer(error):
            raise ConnectionError(
                f"the Hugging Face hub cannot be reached ({one_line(error)}); the same command "
                "continues when it can"
            ) from error
    corpus = load_corpus(name)
    train = corpus.train[:num_shards]
    # hf://datasets/owner/name@revision/PATH
    urls = [shard.url for shard in (*train, *corpus.validation)]
    files = [url.partition(f"{config.repo}@")[2].partition("/")[2] for url in urls]
    with_retries(
        lambda: snapshot_download(
            config.repo,
            repo_type="dataset",
            revision=config.revision,
            allow_patterns=files,
            local_dir=folder,
            max_workers=num_workers,
        ),
        f"{config.repo} at {config.revision}",
    )
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        raise FileNotFoundError(f"{config.repo}: {missing[0]} was not downloaded; run it again")
    mirror = {
        "description": f"{corpus.name}: {config.repo} at {config.revision}, {len(train)} files",
        "source": "files",
        "files": [f"${{CORPUS_DIR}}/{file}" for file in files],
        "validation_shards": len(corpus.validation),
        "text_field": config.text_field,
    }
    written = folder / f"{corpus.name}.yaml"
    with named_errors(written):
        written.write_text(yaml.safe_dump(mirror, sort_keys=False), encoding="utf-8")
    return written
