"""`make gpu-check` never passes where there is no GPU."""

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.stack
ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_fails() -> None:
    argv = (sys.executable, "-m", "tests.gpu_check")
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no GPU here; nothing was checked" in done.stderr
    unknown = subprocess.run((*argv, "attntion"), cwd=ROOT, capture_output=True, text=True, check=False)
    assert unknown.returncode == 1 and "no check 'attntion'; there are: attention, model" in unknown.stderr
