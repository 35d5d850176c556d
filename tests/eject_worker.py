"""Loads ejected models where there is no rewire, and compares them with what the rewired ones computed.

Run by `python -I -S`: no environment variable and no .pth file brings rewire in.

    python -I -S eject_worker.py TESTS SITE_PACKAGES FOLDER [FOLDER ..]

Prints JSON: for each folder the relative differences, or what went wrong.
"""

import importlib
import importlib.util
import json
import os
import sys
import traceback
from pathlib import Path

sys.path += sys.argv[1:3]
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_MODULES_CACHE"] = str(Path(sys.argv[3]).parent)
if importlib.util.find_spec("rewire") is not None:
    sys.exit("rewire can be imported here")

import torch


def difference(a, b, least=1e-12):
    return float((a.detach() - b).norm() / b.norm().clamp_min(least))


def loaded(folder, case):
    if case["make"] is None:
        import torchvision_stub  # noqa: F401
        import transformers

        transformers.logging.set_verbosity_error()
        auto = getattr(transformers, case["auto"])
        return auto.from_pretrained(folder, trust_remote_code=True, dtype=case["dtype"])
    from safetensors.torch import load_model

    sys.path.insert(0, str(folder.parent))
    ejected = importlib.import_module(f"{folder.name}.{case['module']}")
    models = importlib.import_module("models")
    make = models.CASES[case["make"]].make
    model = getattr(ejected, make.__name__)() if isinstance(make, type) else ejected.connected(make())
    model = model.to(case["dtype"])
    load_model(model, folder / "model.safetensors")
    return model


def compared(folder):
    case = torch.load(folder / "case.pt", weights_only=False)
    model = loaded(folder, case).train(case["training"])
    outputs = model(*case["args"], **case["kwargs"])
    found = outputs if isinstance(outputs, torch.Tensor) else outputs[0]
    found.float().square().mean().backward()
    parameters = dict(model.named_parameters())
    if set(parameters) != set(case["gradients"]):
        raise AssertionError(f"other parameters: {set(parameters) ^ set(case['gradients'])}")
    result = {"outputs": difference(found, case["outputs"])}
    given = {name: gradient for name, gradient in case["gradients"].items() if gradient is not None}
    least = 1e-3 * float(max(gradient.norm() for gradient in given.values()))  # of smaller ones, rounding is seen
    result["gradients"] = max(difference(parameters[name].grad, g, least) for name, g in given.items())
    if case["collected"] is not None:
        pairs = zip(outputs.hidden_states, case["collected"], strict=True)
        result["collected"] = max(difference(a, b) for a, b in pairs)
    if case["generated"] is not None:
        tokens = model.eval().generate(case["kwargs"]["input_ids"], max_new_tokens=6, do_sample=False)
        result["generated"] = float((tokens != case["generated"]).sum())
    return result


results = {}
for folder in map(Path, sys.argv[3:]):
    try:
        results[folder.name] = compared(folder)
    except Exception:
        results[folder.name] = traceback.format_exc()
if any(name.partition(".")[0] == "rewire" for name in sys.modules):
    sys.exit("rewire was imported")
print(json.dumps(results))
