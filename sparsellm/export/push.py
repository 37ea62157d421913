"""`sparsellm export --push`: an exported folder on the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

_LOG_IN = "log in with `hf auth login`, or set HF_TOKEN to a token that may write"


def check_push(repo: str) -> None:
    """Checks that can fail before anything is computed.

    Raises:
        ValueError: it is not the name of a repository, or nobody is logged in.
    """
    from huggingface_hub import get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ValueError(f"--push {repo}: {error}; give such as my-name/my-model") from error
    if "/" not in repo:
        raise ValueError(f"--push {repo}: name the owner too, such as my-name/{repo}")
    if get_token() is None:
        raise ValueError(f"--push {repo}: you are not logged in to the hub; {_LOG_IN}")


def push(folder: Path, repo: str, *, private: bool, message: str) -> str:
    """Uploads a folder as one commit; the repository is made if there is none.

    Returns:
        The address of the model.

    Raises:
        ValueError: the hub refuses or cannot be reached; the folder is as it was.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi()
    try:
        address = api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message=message)
    except (HfHubHTTPError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"--push {repo}: {reason}. {folder} is complete here; {_LOG_IN}, and push it again: "
            f"hf upload {repo} {folder}"
        ) from error
    return str(address)
