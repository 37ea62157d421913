from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def cubins(request):
    """The folder of what was compiled before."""
    return Path(request.config.cache.mkdir("cubins"))
