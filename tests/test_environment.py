"""The links at the repository's root, and what they could do to other packages."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("name", ["passes", "kernels"])
def test_root_links_are_relative_and_lead_into_the_package(name: str) -> None:
    link = ROOT / name
    assert os.readlink(link) == f"rewire/{name}"
    assert (link / "__init__.py").samefile(ROOT / "rewire" / name / "__init__.py")


# transformers and diffusers look for a package named `kernels` (Hugging Face's). With the repository's
# root first on the path they find ours, and transformers even imports it to ask for its version.
USE_BOTH = """
import os
import torchvision_stub
import transformers, diffusers
from transformers.utils import is_kernels_available
from transformers import LlamaConfig, LlamaForCausalLM

assert not is_kernels_available()
assert not diffusers.utils.is_kernels_available()
LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1))

import rewire.passes, rewire.kernels
import passes, kernels

for ours, linked in [(rewire.passes, passes), (rewire.kernels, kernels)]:
    assert os.path.samefile(ours.__file__, linked.__file__), linked
"""


@pytest.mark.slow
def test_transformers_works_with_the_root_first_on_the_path() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    command = [sys.executable, "-c", USE_BOTH]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
