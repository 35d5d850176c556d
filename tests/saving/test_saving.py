"""rewire.save and rewire.load: round trips, what is refused, and saves that are cut off."""

from __future__ import annotations

import builtins
import dataclasses
import json
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from every_topology import EVERY, kinds_first
from every_topology import mixed as mixed_by_key
from mixing import ids, learned, llama, mixed
from models import PostNorm, PreNorm, Shared, Stack, vectors
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import rewire
from rewire.patterns.tiny import tiny_model
from rewire.saving import folder as saving
from rewire.saving.checkpoint import matrices
from rewire.topologies import make_topology, registry


def another(seed: int = 9) -> nn.Module:
    """The architecture of `llama`, with other weights."""
    return tiny_model("llama", seed=seed).eval()


def stack() -> nn.Module:
    return Stack(PreNorm).eval()


def equal(left: nn.Module, right: nn.Module, *inputs: Tensor) -> bool:
    with torch.no_grad():
        a, b = left(*inputs), right(*inputs)
    return torch.equal(getattr(a, "logits", a), getattr(b, "logits", b))


def rewritten(folder: Path, text: str) -> Path:
    """The folder, with this recipe in the JSON, and of its trunk in the state dict."""
    (folder / saving.RECIPE).write_text(text)
    (file,) = folder.glob("*.safetensors")
    (recipe,) = json.loads(text)["trunks"].values()
    own = json.dumps({key: value for key, value in recipe.items() if key != "sites"}).encode()
    state = {
        name: torch.tensor(list(own), dtype=torch.uint8) if "_extra" in name else value
        for name, value in load_file(file).items()
    }
    save_file(state, file)
    return sealed(folder)


def changed(folder: Path, change: Callable[[Any], None]) -> Path:
    """The folder, after ``change`` was made to its recipe."""
    recipe = json.loads((folder / saving.RECIPE).read_text())
    change(recipe)
    (folder / saving.RECIPE).write_text(json.dumps(recipe))
    return sealed(folder)


def sealed(folder: Path) -> Path:
    """The folder, with the digests of what it holds now, as somebody who means harm would leave it."""
    recipe = json.loads((folder / saving.RECIPE).read_text())
    recipe["sha256"] = {name: saving._digest(folder / name) for name in recipe["sha256"]}
    recipe["recipe_sha256"] = saving._fingerprint(recipe)
    (folder / saving.RECIPE).write_text(json.dumps(recipe))
    return folder


@dataclasses.dataclass(frozen=True)
class Halved(rewire.Residual):
    """Plain residual connections, with a part of each branch."""

    share: float = 0.5
    form: str = "paper"

    def for_start(self, start: Any) -> Halved:
        return dataclasses.replace(self, form=start)

    def merge(self, states: Any, weights: None, t: int, *branches: Tensor) -> Any:
        return states[0] + (1 if self.form == "preserve" else self.share) * sum(branches)


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """`rewire.register_topology`, for one test."""
    monkeypatch.setattr(registry._FACTORIES, "_entries", dict(registry._FACTORIES._entries))
    return rewire.register_topology


def test_a_topology_of_a_registered_class_or_function(register: Callable[[str], Any], tmp_path: Path) -> None:
    @register("a-third")
    def third(form: str = "paper") -> Halved:
        return Halved(1 / 3, form)

    register("a-half")(Halved)  # an example of a docstring registers "halved"
    for name, options in (("a-third", {}), ("a-half", {"share": 0.25})):
        for start in ("paper", "preserve"):
            model = rewire.compile(stack(), name, **options, start=start, validate=False)  # type: ignore[arg-type]
            (connection,) = rewire.connections(model).values()
            assert connection.recipe()["topology"] == name
            assert connection.recipe()["options"] == {**options, "form": start}
            rewire.save(model, tmp_path)
            assert equal(rewire.load(tmp_path, stack()), model, vectors())


def test_a_topology_that_is_not_registered(register: Callable[[str], Any], tmp_path: Path) -> None:
    """Its class may have any name, and a parent that is registered."""
    register("other")(Halved)
    model = rewire.compile(stack(), dataclasses.dataclass(frozen=True)(type("ANCRe", (Halved,), {}))(), start="paper")
    model.load_state_dict(model.state_dict())
    with pytest.raises(rewire.RewireError, match=r"trunk 'layers' cannot be saved.*Register its class"):
        rewire.save(model, tmp_path)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    with pytest.raises(rewire.UnknownName, match=r"\.ANCRe' is not known here"):
        matrices(tmp_path / "state.pt")


def test_one_connection_by_two_names() -> None:
    """A state dict loads under either."""
    rezero, skipinit = (mixed_by_key(stack(), name) for name in ("rezero", "skipinit"))
    names = [next(iter(rewire.connections(model).values())).recipe()["topology"] for model in (rezero, skipinit)]
    assert names == ["rezero", "skipinit"]
    rezero.load_state_dict(skipinit.state_dict())


@pytest.mark.parametrize("key", EVERY)
def test_recipes_name_topologies_as_users_do(key: str) -> None:
    name, options = EVERY[key]
    (connection,) = rewire.connections(mixed_by_key(stack(), key)).values()
    recipe = connection.recipe()
    assert recipe["topology"] == name
    made = json.loads(json.dumps(recipe["options"]))
    assert connection.trunk is not None
    placed = make_topology(name, options).placed([site.kind for site in connection.trunk.sites])
    assert made.keys() >= options.keys() and make_topology(name, made) == placed


@pytest.mark.parametrize("key", kinds_first(EVERY))
def test_every_topology(key: str, tmp_path: Path) -> None:
    model = mixed_by_key(stack(), key)
    rewire.save(model, tmp_path / "new" / "folder")
    loaded = rewire.load(tmp_path / "new" / "folder", stack())
    assert equal(loaded, model, vectors())
    assert torch.equal(rewire.coefficients(loaded)["layers"], rewire.coefficients(model)["layers"])


def test_what_was_saved_can_be_looked_at_without_the_model(tmp_path: Path) -> None:
    model = mixed(llama())
    rewire.save(model, tmp_path / "saved", max_shard_bytes=5e4)  # type: ignore[arg-type]
    model.save_pretrained(tmp_path / "pretrained", max_shard_size="50KB")
    for folder in ("saved", "pretrained"):
        (found,) = matrices(tmp_path / folder).values()
        assert torch.equal(found, rewire.coefficients(model)["model.layers"])


@pytest.mark.parametrize("make", [Shared, lambda: Stack(PostNorm)], ids=["shared", "post-norm"])
@pytest.mark.parametrize("granularity", ["auto", "sublayer"])
def test_other_trunks(make: Callable[[], nn.Module], granularity: Any, tmp_path: Path) -> None:
    model = mixed(make(), granularity=granularity)
    rewire.save(model, tmp_path)
    torch.manual_seed(5)
    loaded = rewire.load(tmp_path, make())
    assert equal(loaded, model, vectors())
    assert next(iter(rewire.connections(loaded).values())).start == "paper"


def test_trunks_with_topologies_of_their_own(tmp_path: Path) -> None:
    model = rewire.compile(tiny_model("t5"), {"encoder": "dca", "decoder": "denseformer"}, validate=False)
    rewire.save(model, tmp_path)
    loaded = rewire.load(tmp_path, tiny_model("t5", seed=4))
    layouts = {name: connection.layout for name, connection in rewire.connections(loaded).items()}
    assert layouts.keys() == rewire.connections(model).keys() and layouts["encoder.block"].dims.attention
    state = loaded.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert loaded.shared.weight is loaded.encoder.embed_tokens.weight  # tied


def test_trunks_that_stayed_plain(tmp_path: Path) -> None:
    rewire.save(rewire.compile(tiny_model("t5"), trunks="encoder", validate=False), tmp_path)
    assert list(rewire.connections(rewire.load(tmp_path, tiny_model("t5")))) == ["encoder.block"]


@pytest.mark.parametrize("topology", ["ancre-ingoing", "grn-v2"])
def test_frozen(topology: str, tmp_path: Path) -> None:
    model, _ = rewire.freeze(mixed(stack(), topology), 0.3, example_inputs=(vectors(),))
    rewire.save(model, tmp_path)
    loaded = rewire.load(tmp_path, stack())
    assert equal(loaded, model, vectors())
    assert rewire.source(loaded, "layers.1") == rewire.source(model, "layers.1")


def test_several_files_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    model = mixed(llama())
    rewire.save(model, tmp_path, max_shard_bytes=50_000)
    first = {path.name for path in tmp_path.iterdir()}
    assert len(first) > 4 and all(name.endswith((".safetensors", ".json", ".txt")) for name in first)
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    rewire.save(model, tmp_path)
    second = {path.name for path in tmp_path.iterdir()}
    assert len(second) == 3 and first & second == {"notes.txt", saving.RECIPE}
    assert equal(rewire.load(tmp_path, another()), model, ids())


def test_the_given_model_shares_what_is_loaded(tmp_path: Path) -> None:
    model = mixed(llama())
    rewire.save(model, tmp_path)
    plain = another().bfloat16()
    loaded = rewire.load(tmp_path, plain)
    assert loaded.lm_head.weight is plain.lm_head.weight and not rewire.connections(plain)
    assert torch.equal(plain.lm_head.weight, model.lm_head.weight.bfloat16())
    assert {value.dtype for value in learned(loaded).values()} == {torch.float32}


def test_only_the_connections(tmp_path: Path) -> None:
    model, base = mixed(llama()), another()
    expected = mixed(another())
    rewire.save(model, tmp_path / "all")
    rewire.save(model, tmp_path / "own", weights="connections")
    assert sum(path.stat().st_size for path in (tmp_path / "own").iterdir()) < 4000
    for folder in (tmp_path / "all", tmp_path / "own"):
        assert equal(rewire.load(folder, base, weights="connections"), expected, ids())
    with pytest.raises(rewire.RewireError, match="connection weights only: pass weights='connections'"):
        rewire.load(tmp_path / "own", base)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.stack, self.head = nn.Linear(8, 8), Stack(PreNorm), nn.Linear(8, 8)
        self.head.weight = self.embed.weight
        self.register_buffer("transposed", torch.arange(6.0).view(2, 3).T)
        self.register_buffer("part", torch.arange(9.0)[2:4])

    def forward(self, x: Tensor) -> Tensor:
        return self.stack(self.head(self.embed(x)))


def test_tied_weights_and_views(tmp_path: Path) -> None:
    model = mixed(Tied())
    rewire.save(model, tmp_path)
    saved = saving.safe_open(next(tmp_path.glob("*.safetensors")), "pt").keys()
    assert "embed.weight" in saved and "head.weight" not in saved
    torch.manual_seed(3)
    plain = Tied()
    plain.transposed.zero_()
    loaded = rewire.load(tmp_path, plain)
    assert equal(loaded, model, vectors()) and loaded.head.weight is loaded.embed.weight
    assert torch.equal(loaded.transposed, model.transposed) and torch.equal(loaded.part, model.part)


def test_a_model_on_the_meta_device(tmp_path: Path) -> None:
    model = mixed(Tied())
    rewire.save(model, tmp_path, max_shard_bytes=2000)
    with torch.device("meta"):
        plain = Tied().bfloat16().requires_grad_(False)
    loaded = rewire.load(tmp_path, plain)
    assert loaded.head.weight is loaded.embed.weight and plain.head.weight.is_meta
    assert loaded.head.weight.dtype == torch.bfloat16 and not loaded.head.weight.requires_grad
    (connection,) = rewire.connections(loaded).values()
    assert torch.equal(connection.logits, next(iter(learned(model).values())))
    assert equal(loaded, model.bfloat16(), vectors().bfloat16())


def test_buffers_that_no_state_dict_has_stay_on_meta_and_are_named(tmp_path: Path) -> None:
    rewire.save(mixed(llama()), tmp_path)
    with torch.device("meta"):
        plain = another()
    with pytest.raises(rewire.RewireError, match=r"model\.rotary_emb\.inv_freq.* on the meta device"):
        rewire.load(tmp_path, plain)


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(rewire.RewireError, match="Stack was not rewired"):
        rewire.save(stack(), tmp_path)
    model = mixed(stack())
    with pytest.raises(ValueError, match="max_shard_bytes=0"):
        rewire.save(model, tmp_path, max_shard_bytes=0)
    with pytest.raises(ValueError, match="weights must be 'all' or 'connections', not 'none'"):
        rewire.save(model, tmp_path, weights="none")  # type: ignore[arg-type]
    with pytest.raises(rewire.RewireError, match=r"'inp\.weight' is on the meta device"):
        rewire.save(model.to("meta"), tmp_path)
    assert not list(tmp_path.iterdir())


def test_another_model_is_refused_with_what_differs(tmp_path: Path) -> None:
    rewire.save(mixed(stack()), tmp_path)
    deeper = Stack(PreNorm)
    deeper.layers.append(PreNorm())
    with pytest.raises(rewire.RewireError, match=r"the model that.*\n  \+depth_connections\.layers: layers\.3\.attn"):
        rewire.load(tmp_path, deeper)
    with pytest.raises(rewire.RewireError, match=r"(?s)-depth_conn.*no trunk.*\+.*layers\.0\.self_attn"):
        rewire.load(tmp_path, another())
    with pytest.raises(rewire.RewireError, match=r"(?s)-.*width 32\n.*\+.*width 32, then ln_1"):
        rewire.load(tmp_path, Stack(PostNorm))
    other = stack()
    other.out = nn.Linear(32, 6)
    kept = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(rewire.RewireError, match=r"(?s)-out\.weight \[5, 32\].*\+out\.weight \[6, 32\]"):
        rewire.load(tmp_path, other)
    assert all(torch.equal(kept[name], value) for name, value in other.state_dict().items())  # nothing was loaded
    with pytest.raises(rewire.AlreadyRewired):
        rewire.load(tmp_path, mixed(stack()))
    with pytest.raises(ValueError, match="weights must be"):
        rewire.load(tmp_path, stack(), weights="both")  # type: ignore[arg-type]


def test_another_format_is_refused(tmp_path: Path) -> None:
    rewire.save(mixed(stack()), tmp_path)
    changed(tmp_path, lambda recipe: recipe.update(format=3, versions={"rewire": "9.0"}))
    with pytest.raises(rewire.RewireError, match=r"(?s)cannot be read by rewire.*-format: 3.*9\.0.*\+format: 2"):
        rewire.load(tmp_path, stack())


def test_no_folder_and_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(rewire.RewireError, match=r"holds no rewire\.json, which rewire\.save writes"):
        rewire.load(tmp_path / "missing", stack())
    for text in ("", "[]", "{}", "nonsense", "[" * 100_000, '{"format": 2}'):
        (tmp_path / saving.RECIPE).write_text(text)
        with pytest.raises(rewire.RewireError, match="is damaged"):
            rewire.load(tmp_path, stack())
    rewire.save(mixed(stack()), tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(rewire.RewireError, match="is damaged: it is not the file that was saved"):
        rewire.load(tmp_path, stack())
    with pytest.raises(rewire.RewireError, match="cannot be read"):
        rewire.load(sealed(tmp_path), stack())
    file.unlink()
    with pytest.raises(rewire.RewireError, match="not all of its files are there"):
        rewire.load(tmp_path, stack())
    os.mkfifo(file)
    with pytest.raises(rewire.RewireError, match="not all of its files are there"):
        rewire.load(tmp_path, stack())


def test_any_change_to_a_file_is_noticed(tmp_path: Path) -> None:
    check_changes(tmp_path, 150)


@pytest.mark.slow
def test_many_changes_to_files_are_noticed(tmp_path: Path) -> None:
    check_changes(tmp_path, 2000)


def check_changes(folder: Path, count: int) -> None:
    """Bytes changed, left out, doubled, or swapped with others: refused, or what is loaded is what was saved."""
    model = mixed(stack())
    rewire.save(model, folder)
    want, chance = model.state_dict(), random.Random(0)
    files = [folder / saving.RECIPE, *folder.glob("*.safetensors")]
    refused = 0
    for _ in range(count):
        file = chance.choice(files)
        whole = file.read_bytes()
        at, to = sorted(chance.sample(range(len(whole)), 2))
        other = bytes([chance.randrange(256)])
        file.write_bytes(
            chance.choice(
                [
                    whole[:at] + other + whole[at + 1 :],
                    whole[:at] + whole[at + 1 :],
                    whole[:to] + whole[at:],
                    whole[:at] + whole[to : to + 1] + whole[at + 1 :],
                    whole[:at],
                ]
            )
        )
        try:
            loaded = rewire.load(folder, stack())
        except rewire.RewireError:
            refused += 1
        else:
            assert all(torch.equal(value, want[name]) for name, value in loaded.state_dict().items())
        file.write_bytes(whole)
    assert refused > 0.8 * count


def test_weights_of_another_recipe_are_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    rewire.save(mixed(stack()), tmp_path)
    text = (tmp_path / saving.RECIPE).read_text()
    rewritten(tmp_path, text.replace("0.01", "0.5"))
    (tmp_path / saving.RECIPE).write_text(text)
    sealed(tmp_path)
    plain = stack()
    kept = {name: value.clone() for name, value in plain.state_dict().items()}
    with pytest.raises(rewire.RewireError, match=r"belong to another rewiring.*temperature"):
        rewire.load(tmp_path, plain)
    assert all(torch.equal(kept[name], value) for name, value in plain.state_dict().items())


EVIL = "__import__('os').mkdir('ran')"
TRUNK = "depth_connections.layers"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.update(files=["../secret.safetensors"]), "files are"),
        (lambda r: r.update(files=[7]), "files are"),
        (lambda r: r.update(tied={"a": ["b"]}), "tied are"),
        (lambda r: r.update(tied={"out.weight": "inp.weight"}), "not this model's"),
        (lambda r: r.update(start=EVIL), "start is"),
        (lambda r: r.update(weights=EVIL), "weights are"),
        (lambda r: r.update(trunks=[]), "damaged"),
        (lambda r: r.update(trunks={}), "damaged"),
        (lambda r: r.update(trunks={EVIL: r["trunks"][TRUNK]}), "not the model that was saved"),
        (lambda r: r["trunks"].update({TRUNK: EVIL}), "damaged"),
        (lambda r: r["trunks"][TRUNK].update(topology=EVIL), "not known here"),
        (lambda r: r["trunks"][TRUNK].update(topology="Topology"), "not known here"),
        (lambda r: r["trunks"][TRUNK].update(topology=["ANCRe"]), "damaged"),
        (lambda r: r["trunks"][TRUNK]["options"].update(temperature=EVIL), "do not fit"),
        (lambda r: r["trunks"][TRUNK]["options"].update(temperature=float("nan")), "damaged"),
        (lambda r: r["trunks"][TRUNK]["options"].update({EVIL: 1}), "do not fit"),
        (lambda r: r["trunks"][TRUNK].update(options=EVIL), "do not fit"),
        (lambda r: r["trunks"][TRUNK].update(options=None), "do not fit"),
        (lambda r: r["trunks"][TRUNK].update(units=[EVIL]), "damaged"),
        (lambda r: r["trunks"][TRUNK].update(units=[1, 1]), "does not fit this model"),
        (lambda r: r["trunks"][TRUNK].update(units=[10**9]), "damaged"),
        (lambda r: r["trunks"][TRUNK].update(units=list(range(1, 20_001))), "damaged"),
        (lambda r: r.update(sha256={}), "sha256 are"),
        (lambda r: r["trunks"][TRUNK].update(width=10**12), "does not fit this model"),
        (lambda r: r["trunks"][TRUNK].update(width=EVIL), "damaged"),
        (lambda r: r["trunks"][TRUNK].update(attention=[EVIL]), "damaged"),
        (lambda r: r["trunks"][TRUNK].update(sites=[EVIL]), "not the model that was saved"),
        (lambda r: r["trunks"][TRUNK].update(sites=[7]), "damaged"),
        (lambda r: r["trunks"][TRUNK].update(more=EVIL), "is not that of the model it gives"),
    ],
)
def test_hostile_recipes(change: Callable[[Any], None], message: str, tmp_path: Path, monkeypatch: Any) -> None:
    rewire.save(mixed(stack()), tmp_path / "saved")
    monkeypatch.chdir(tmp_path)
    plain = stack()
    kept = {name: value.clone() for name, value in plain.state_dict().items()}
    with pytest.raises(rewire.RewireError, match=message):
        rewire.load(changed(tmp_path / "saved", change), plain)
    assert not (tmp_path / "ran").exists()
    assert all(torch.equal(kept[name], value) for name, value in plain.state_dict().items())


def test_hostile_programs_of_frozen_trunks_never_become_code(tmp_path: Path, monkeypatch: Any) -> None:
    """Names in a frozen program become variables of the generated forward."""
    frozen, _ = rewire.freeze(mixed(stack()), 0.0, example_inputs=(vectors(),))
    rewire.save(frozen, tmp_path / "saved")
    monkeypatch.chdir(tmp_path)
    text = (tmp_path / "saved" / saving.RECIPE).read_text()
    ran: list[str] = []
    monkeypatch.setattr(builtins, "ran", ran.append, raising=False)
    for name in ("ran('x')", "x1\n    ran('x')\n    y", "ran('x') or x1", "self", "class", "x1 = ran"):
        loaded = rewire.load(rewritten(tmp_path / "saved", text.replace('"x1"', json.dumps(name))), stack())
        assert equal(loaded, frozen, vectors())
        assert "ran(" not in rewire.source(loaded, "layers.0")
    (weight,) = set(re.findall(r"0\.54\d+", text))  # a number of the program
    for other in ('"ran()"', '["ran()"]', "NaN", "1e999"):
        with pytest.raises(rewire.RewireError, match=r"damaged|do not fit"):
            rewire.load(rewritten(tmp_path / "saved", text.replace(weight, other)), stack())
    assert ran == []


def test_from_pretrained_of_what_save_wrote_names_load(tmp_path: Path) -> None:
    rewire.save(rewire.compile(Stack(PreNorm), "ancre-ingoing", validate=False), tmp_path)
    with pytest.raises(rewire.RewireError, match=r"by rewire\.save: load it with rewire\.load\(folder, model\)"):
        rewire.from_pretrained(tmp_path)


@pytest.mark.parametrize("which", [0, 1, -1])
def test_a_model_that_has_lost_a_block_is_not_saved(which: int, tmp_path: Path) -> None:
    rewired = rewire.compile(Stack(PreNorm, 3), "denseformer", validate=False)
    del rewired.layers[which]
    with pytest.raises(rewire.RewireError, match=r"has lost 'layers\.2' since it was rewired.*could not be loaded"):
        rewire.save(rewired, tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def test_from_pretrained_of_another_library(tmp_path: Path) -> None:
    import diffusers

    transformer = diffusers.DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=4,
        in_channels=4,
        num_layers=2,
        sample_size=4,
        norm_type="ada_norm_zero",
    )
    rewired = rewire.compile(transformer, "denseformer", validate=False)
    rewired.save_pretrained(tmp_path / "own")
    for given in ((), (diffusers.DiTTransformer2DModel,)):
        with pytest.raises(rewire.RewireError, match=r"other libraries \(diffusers, timm\) are saved by rewire\.save"):
            rewire.from_pretrained(tmp_path / "own", *given)
    rewire.save(rewired, tmp_path / "ours")
    loaded = rewire.load(tmp_path / "ours", diffusers.DiTTransformer2DModel.from_config(transformer.config))
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in rewired.named_parameters())
