"""From words to points: groups, sweeps, names, identity, and that conf/ and the schema are the same list of keys."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import itertools
import random
import re
import shutil
import subprocess
import sys
import time
import typing
from pathlib import Path

import pytest
import yaml

from toymha import compose, composed, config, runs, schema, words
from toymha.config import Config
from toymha.schema import UserError

GROUP_FILES = [(g, p.stem) for g in compose.GROUPS for p in sorted((config.conf_dir() / g).glob("*.yaml"))]
# These stand for nothing without a path.
REASON_FOR_FILE = {"file": ["data.path=corpus.txt"], "pairs": ["data.path=pairs.tsv"]}

# Keys that only say where a run goes, how much it tells and on what machine it computes; the text counts by its hash.
NOT_IDENTITY = {
    "name", "output_dir", "overwrite", "device", "threads", "workers", "compile", "data.path",
    "budget.log_every", "budget.checkpoint_every", "budget.sample_tokens", "budget.decode_tokens",
    "budget.heads",
    "budget.watch", "budget.beam", "budget.eval_pairs",
    "sweep.name", "sweep.question", "sweep.axes",
}  # fmt: skip


def one(*words: str) -> compose.Point:
    (point,) = compose.points(["data=pydoc", *words])
    return point


def many(*words: str, extra: Path | None = None) -> list[compose.Point]:
    return compose.points([*words], multirun=True, extra=extra)


def labels(points: list[compose.Point]) -> list[str]:
    return [p.label for p in points]


def refused(*words: str, multirun: bool = False) -> str:
    with pytest.raises(UserError) as e:
        compose.points(list(words), multirun)
    assert "\n" not in str(e.value)
    return str(e.value)


# Who wins


@pytest.mark.parametrize("words", [("model=mqa", "n_head=16"), ("n_head=16", "model=mqa")])
def test_command_line_joins_a_group_in_any_order(words):
    """model=mqa n_head=16 is 16 query heads over 1 key/value head, whatever stands first."""
    c = one(*words).config
    assert (c.n_head, c.n_kv_head, c.G) == (16, 1, 1)


@pytest.mark.parametrize(
    "words, key, value",
    [
        (("model=gqa", "n_kv_head=4"), "n_kv_head", 4),
        (("model=gpt2_small", "seq_len=32"), "seq_len", 32),
        (("budget=smoke", "budget.steps=7"), "budget.steps", 7),
        (("optim=adamw", "optim.lr=1e-5"), "optim.lr", 0.00001),
        (("data.tokenizer=byte",), "data.tokenizer", "byte"),
    ],
)
def test_command_line_beats_a_group(words, key, value):
    """What is typed wins over what a group's file says, before or after it."""
    for order in (words, words[::-1]):
        assert compose._get(config.plain(one(*order).config), key) == value


@pytest.mark.parametrize("budget, beam", [("smoke", 1), ("quick", 4)])
def test_a_budget_beats_a_model(budget, beam):
    """A model says how its runs are looked at, and a budget may want less."""
    assert compose.points(["model=encdec", f"budget={budget}"])[0].config.budget.beam == beam


@pytest.mark.parametrize("multirun", [False, True])
def test_two_ways_to_write_a_number_are_one(multirun):
    """1e-5 and 0.00001 are the same value, type and run, with and without -m."""
    a, b = (compose.points(["data=pydoc", f"optim.lr={x}"], multirun)[0] for x in ("1e-5", "0.00001"))
    assert a == b and isinstance(a.config.optim.lr, float)


def test_what_is_null_stays_null():
    """Values that follow from others are properties; the config keeps its null."""
    c = one().config
    assert c.head_dim is None and c.n_kv_head is None and c.dim // c.n_head == c.D and c.n_head == c.G


# Sweeps


def test_axes_multiply_and_the_last_varies_fastest():
    """Lists, range() and choice() make a grid in the order they were typed."""
    points = many("data=pydoc", "n_head=1,2", "mlp=choice(gelu,swiglu)", "seed=range(2)")
    assert [(p.config.n_head, p.config.mlp, p.config.seed) for p in points] == list(
        itertools.product((1, 2), ("gelu", "swiglu"), (0, 1))
    )
    assert [p.swept for p in points][1] == {"n_head": 1, "mlp": "gelu", "seed": 1}


def test_a_sweep_over_a_group():
    """model=mha,gqa composes each file, and a key typed beside it holds for both."""
    points = many("data=pydoc", "model=mha,gqa,mqa", "n_head=8")
    assert [(p.config.n_head, p.config.G) for p in points] == [(8, 8), (8, 2), (8, 1)]
    assert [p.choices["model"] for p in points] == ["mha", "gqa", "mqa"]


def test_a_key_that_follows_another():
    """n_kv_head=${n_head} beside n_head=2,4 is two points with equal values, named without the braces."""
    points = many("data=pydoc", "n_head=2,4", "n_kv_head=${n_head}")
    assert [(p.config.n_head, p.config.n_kv_head) for p in points] == [(2, 2), (4, 4)]
    assert not any("$" in p.label for p in points)


@pytest.mark.parametrize("words", [("seed=1,1,1",), ("n_head=2,2", "seed=1"), ("optim.lr=1e-3,0.001", "seed=1")])
def test_repeats_collapse(words):
    """The same run asked for several times is one run."""
    assert len(many("data=pydoc", *words)) == 1


@pytest.mark.parametrize("key, values", [("threads", "1,2"), ("device", "auto,cpu"), ("compile", "false,true")])
def test_keys_that_make_no_run_of_their_own_cannot_be_swept(key, values):
    """All points of such a sweep would share one folder, so it is refused rather than cut down to one in silence."""
    assert key in refused("data=pydoc", f"{key}={values}", multirun=True)


def test_swept_values_are_those_of_the_config():
    """A float key swept as 0,0.1 has the values 0.0 and 0.1, as the table of results looks them up."""
    points = many("data=pydoc", "attn_dropout=0,0.1", "n_kv_head=1,${n_head}")
    assert [list(p.swept.values()) for p in points] == [[0.0, 1], [0.0, 4], [0.1, 1], [0.1, 4]]
    assert all(isinstance(p.swept["attn_dropout"], float) for p in points)


def test_a_canned_sweep_and_words_over_it():
    """sweep=relations expands its axes without -m; an axis that is typed replaces the file's."""
    points = compose.points(["data=pydoc", "sweep=relations"])
    assert {(p.config.n_head, p.config.seed) for p in points} == set(itertools.product((1, 2, 4, 8), range(3)))
    assert len(points) == 12 and {runs.folder(p.config, p.label).parts[1] for p in points} == {"relations"}
    fewer = compose.points(["data=pydoc", "sweep=relations", "seed=7"])
    assert [(p.config.n_head, p.config.seed) for p in fewer] == [(h, 7) for h in (1, 2, 4, 8)]


def test_many_points_compose_in_seconds():
    """900 points take a few seconds, all of them validated and named."""
    began = time.perf_counter()
    points = many("data=pydoc", "n_head=1,2,4", "optim.lr=1e-4,1e-3,1e-2", "seed=range(100)")
    assert len(points) == 900 and time.perf_counter() - began < 10


def test_the_last_point_is_checked_too():
    """One impossible point refuses the whole sweep, before anything starts."""
    assert "n_head=3" in refused("data=pydoc", "n_head=1,2,3", multirun=True)


# Names

ODD = [
    ("seq_len=32",),
    ("data.split=[0.8,0.1,0.1]", "optim.betas=[0.9,0.95]"),
    ("optim.clip=null", "optim.lr=1e-5", "budget.minutes=0.5"),
    tuple(
        "n_layer=2 dim=64 n_head=4 n_kv_head=2 head_dim=8 v_head_dim=16 d_ff=96 mlp=swiglu norm=rms pos=learned "
        "bias=true qkv_bias=true tie_embeddings=false attn_dropout=0.1 resid_dropout=0.1 seq_len=32 batch_size=8 "
        "grad_accum=2 optim.lr=0.00123456789 optim.warmup=3 optim.hold=0.1 budget.steps=77".split()
    ),
]


@pytest.mark.parametrize("words", ODD)
def test_labels_are_flat_short_and_canonical(words):
    """A run's name is one folder of plain characters under 255 bytes, the same whatever the order of the words."""
    there = [one(*order).label for order in (words, words[::-1], sorted(words))]
    assert len(set(there)) == 1
    assert re.fullmatch(r"[\w.=,+-]+", there[0]) and len(there[0].encode()) < 255


PATHS = [
    "a.txt", "x/a.txt", "/x/a.txt", "../a.txt", "语料/输入 1.txt", "别的/输入 1.txt", "步=1.txt", "a,b.txt", "it's.txt",
    "输" * 80 + ".txt", "输" * 80 + "入.txt", "a b.txt", "a-b.txt", "a?b.txt", "..", "con/..",
]  # fmt: skip


def test_labels_of_paths():
    """Different paths have different flat names, also with the same file name, odd characters or great length."""
    points = [compose.points(["data=file", f"data.path={p}"])[0] for p in PATHS]
    assert [p.config.data.path for p in points] == PATHS
    assert len(set(labels(points))) == len(PATHS)
    for p in points:
        assert not set('/\\:*?"<>|\n') & set(p.label) and len(p.label.encode()) < 255
        assert runs.folder(p.config, p.label).parts[:2] == ("outputs", "train")


def test_labels_tell_apart_what_differs():
    """Two values of any swept key have two names, also where many keys make the name long."""
    long = [w for w in ODD[-1] if not w.startswith("budget")]
    points = many("data=pydoc", *long, "budget.steps=10,11", "budget.eval_every=5,6", "budget.tokens=1000,null")
    assert len(set(labels(points))) == 8


def test_the_same_word_in_two_sections_has_two_names():
    """vocab_size of the model and of the data are not one word in a run's name."""
    a = one("vocab_size=300").label
    b = one("data.tokenizer=bpe", "data.vocab_size=300").label
    assert "data.vocab_size" in b or not set(a.split(",")) & {w for w in b.split(",") if "vocab_size" in w}


def test_label_has_what_was_typed_and_no_default():
    """A plain run is `default`; what is typed is shown even where it is the default; the seed has its own folder."""
    assert compose.points([])[0].label == "default"
    assert compose.points(["n_head=4", "seed=3"])[0].label == "n_head=4"
    assert compose.points(["model=mqa"])[0].label == "model=mqa"
    assert many("model=mha,mqa")[0].label == "model=mha"


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/tmp/x", ".."])
def test_a_name_cannot_leave_the_output_folder(name):
    """name= is a folder below output_dir; one that points out of it is refused."""
    assert "name" in refused("data=pydoc", f"name={name}")


# conf/ and the schema


@pytest.mark.parametrize("group, name", GROUP_FILES, ids=lambda x: str(x))
def test_every_file_in_conf_composes(group, name):
    """Each file of each group gives valid points."""
    extra = REASON_FOR_FILE.get(name, []) if group == "data" else []
    points = compose.points([f"{group}={name}", *extra])
    assert points and all(p.choices[group] == name for p in points)


def test_schema_and_primary_config_are_the_same_list():
    """conf/train.yaml has every key of the schema, in sections or at the top, and none besides."""
    raw = yaml.safe_load((config.conf_dir() / "train.yaml").read_text("utf-8"))
    sections = {n for n, (_, hint) in schema.field_types(Config).items() if schema.section_of(hint)}
    assert set(raw) - {"defaults", "fixed"} == set(schema.field_types(Config)) - sections
    assert {next(iter(d)) for d in raw["defaults"] if d != "_self_"} == set(compose.GROUPS)


@pytest.mark.parametrize("group, name", [gn for gn in GROUP_FILES if gn[0] in ("data", "optim", "budget")])
def test_section_files_have_every_key_of_their_section(group, name):
    """A data, optim or budget file replaces its whole section, so it leaves out only what the schema fills in."""
    raw = yaml.safe_load((config.conf_dir() / group / f"{name}.yaml").read_text("utf-8"))
    section = schema.section_of(schema.field_types(Config)[group][1])
    assert set(schema.fill(raw, section)) == set(schema.field_types(section))


@pytest.mark.parametrize("name", [n for g, n in GROUP_FILES if g == "model"])
def test_model_files_set_model_keys_only(name):
    """A model's file changes keys of the model, and holds fixed only keys that it sets; one that reads pairs brings
    the data for it, and the size of its batches."""
    path = config.conf_dir() / "model" / f"{name}.yaml"
    raw = yaml.safe_load(path.read_text("utf-8")) or {}
    top = list(schema.field_types(Config))
    pairs = {"defaults", "batch_size", "budget"} if "n_encoder_layer" in raw else set()
    assert set(raw) - {"fixed"} - pairs <= set(top[: top.index("batch_size")])
    assert set(raw.get("fixed", [])) <= set(raw)
    assert path.read_text("utf-8").startswith("# @package _global_\n# ")


def test_a_fixed_key_is_refused_also_through_like(tmp_path, monkeypatch):
    """A run of model=single cannot become eight heads by starting from its folder and keep that name."""
    monkeypatch.setattr(runs, "git", lambda: None)
    monkeypatch.chdir(tmp_path)
    p = one("model=single")
    run = runs.Run.open(runs.folder(p.config, p.label), p.config, "0" * 64, {"choices": p.choices})
    run.release()
    like = f"like={run.path}"
    assert compose.points([like, "n_head=1"])[0].config.n_head == 1
    try:
        eight = compose.points([like, "n_head=8"])[0]
    except UserError:
        return
    assert "single" not in eight.label and eight.choices.get("model") != "single"


def test_like_keeps_what_the_run_had(tmp_path, monkeypatch):
    """like= takes the run's numbers, not its output and machine keys; groups and words are laid over it."""
    monkeypatch.setattr(runs, "git", lambda: None)
    monkeypatch.chdir(tmp_path)
    p = one("dim=64", "optim=adamw", "optim.lr=0.5", "name=x", "output_dir=o", "threads=1", "device=cpu", "workers=1")
    run = runs.Run.open(runs.folder(p.config, p.label), p.config, "0" * 64, {"choices": p.choices})
    run.release()
    like = f"like={run.path}"
    c = compose.points([like, "model=mqa", "seed=3"])[0].config
    assert (c.dim, c.optim.lr, c.data.name, c.n_kv_head, c.seed) == (64, 0.5, "pydoc", 1, 3)
    c = compose.points([like, "optim=muon"])[0].config
    assert c.optim == one().config.optim and c.dim == 64
    free = dataclasses.asdict(one().config)
    assert {k: getattr(c, k) for k in ("name", "output_dir", "threads", "device", "workers", "overwrite")} == {
        k: free[k] for k in ("name", "output_dir", "threads", "device", "workers", "overwrite")
    }


def test_like_beside_a_second_composer(tmp_path, monkeypatch):
    """Two runs that serve as `like` in one process do not mix."""
    monkeypatch.setattr(runs, "git", lambda: None)
    monkeypatch.chdir(tmp_path)
    paths = []
    for dim in (32, 64):
        p = one(f"dim={dim}")
        run = runs.Run.open(runs.folder(p.config, p.label), p.config, "0" * 64, {"choices": p.choices})
        run.release()
        paths.append(str(run.path))
    a, b = (compose.Composer(p) for p in paths)
    assert [x.point({}, set()).config.dim for x in (a, b, a)] == [32, 64, 32]
    assert [x.point({"model": "mqa"}, set()).config.dim for x in (a, b, a)] == [32, 64, 32]


def test_own_config_dir(tmp_path):
    """--config-dir brings a model and a sweep of one's own, beside those of toymha."""
    (tmp_path / "model").mkdir()
    (tmp_path / "sweep").mkdir()
    (tmp_path / "model/mine.yaml").write_text("# @package _global_\nn_head: 2\nmlp: swiglu\nfixed: [mlp]\n")
    (tmp_path / "sweep/ours.yaml").write_text(
        "# @package _global_\n"
        "sweep:\n  name: ours\n  question: Which?\n  axes:\n    model: mha,mine\n    seed: [0, 5]\n"
    )
    points = compose.points(["data=pydoc", "sweep=ours"], extra=tmp_path)
    assert [(p.choices["model"], p.config.mlp, p.config.seed) for p in points] == [
        ("mha", "gelu", 0), ("mha", "gelu", 5), ("mine", "swiglu", 0), ("mine", "swiglu", 5)
    ]  # fmt: skip
    assert points[0].config.sweep.question == "Which?"
    assert "mine" in config.choices("model", tmp_path) and "mine" not in config.choices("model")
    with pytest.raises(UserError, match="stands for mlp=swiglu"):
        compose.points(["data=pydoc", "model=mine", "mlp=gelu"], extra=tmp_path)


@pytest.mark.parametrize(
    "axes, wrong",
    [("{n_heads: '1,2'}", "n_heads"), ("{n_head: '1,2', seed: 'range('}", "seed"), ("{n_head: '3'}", "n_head=3")],
)
def test_a_wrong_sweep_file_is_refused(tmp_path, axes, wrong):
    """A key or value that does not exist in a sweep file is told as on the command line."""
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep/bad.yaml").write_text(
        f"# @package _global_\nsweep: {{name: bad, question: '?', axes: {axes}}}\n"
    )
    with pytest.raises(UserError, match=wrong):
        compose.points(["data=pydoc", "sweep=bad"], extra=tmp_path)


@pytest.mark.parametrize("text", ["n_heads: 3\n", "n_head: [\n", "defaults: [nothing_here]\n", "n_head: many\n"])
def test_a_wrong_file_of_ones_own_is_one_line(tmp_path, text):
    """A broken or unknown entry in a user's model file is a UserError in one line."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/bad.yaml").write_text("# @package _global_\n" + text)
    with pytest.raises(UserError) as e:
        compose.points(["data=pydoc", "model=bad"], extra=tmp_path)
    assert "\n" not in str(e.value)


# What is kept of a composition


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache folder of its own; the folder of compositions in it."""
    monkeypatch.setenv("TOYMHA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "composed"


def no_hydra(monkeypatch):
    def refuse(*args):
        raise AssertionError("composed again")

    monkeypatch.setattr(composed, "fresh", refuse)


@pytest.mark.parametrize("group, name", GROUP_FILES, ids=lambda x: str(x))
def test_what_is_kept_equals_what_hydra_composes(cache, monkeypatch, group, name):
    """For each file of each group: the same values, of the same types, in the same order."""
    fresh = composed.composed([f"{group}={name}"])
    no_hydra(monkeypatch)
    assert repr(composed.composed([f"{group}={name}"])) == repr(fresh)


def test_a_second_start_needs_no_hydra(cache, monkeypatch):
    """Also for a sweep over a group; another choice is composed when it is asked for first."""
    words = ["data=pydoc", "model=mha,gqa", "n_head=2,4"]
    before = many(*words)
    no_hydra(monkeypatch)
    assert many(*words) == before
    with pytest.raises(AssertionError, match="composed again"):
        many("model=mqa")


def test_the_key_of_a_composition_is_all_that_it_is_made_of(tmp_path, monkeypatch):
    """A changed, new or renamed file, other words, another version, another primary configuration."""
    conf = tmp_path / "conf"
    shutil.copytree(config.conf_dir(), conf)
    monkeypatch.setattr(composed, "conf_dir", lambda: conf)
    own = tmp_path / "own"
    (own / "model").mkdir(parents=True)
    (own / "model/mine.yaml").write_text("# @package _global_\nn_head: 2\n")
    seen = [composed.key([], None, None)]

    def changes(*args):
        seen.append(composed.key(*args))
        assert len(set(seen)) == len(seen)

    changes(["model=gqa"], None, None)
    changes([], own, None)
    changes([], None, {"n_head": 2})
    changes([], None, {"n_head": 4})
    file = conf / "sweep/heads.yaml"
    file.write_bytes(file.read_bytes() + b"\n")
    changes([], None, None)
    changes([], own, None)
    (own / "model/mine.yaml").rename(own / "model/yours.yaml")
    changes([], own, None)
    (conf / "model/new.yaml").write_text("# @package _global_\n")
    changes([], None, None)
    (last := conf / "sweep/zz.yaml").write_text("a: 1\n")
    other = tmp_path / "other"
    (other / "sweep").mkdir(parents=True)
    changes([], other, None)
    last.rename(other / "sweep/zz.yaml")  # the same files in the same order, but another one is the user's
    changes([], other, None)
    monkeypatch.setattr(composed, "version", lambda package: "9.9")
    changes([], None, None)
    monkeypatch.setattr(composed, "FORMAT", composed.FORMAT + 1)
    changes([], None, None)
    assert seen[-1] == composed.key([], None, None) and all(seen)


def test_a_changed_file_is_composed_anew(cache, tmp_path):
    """What was kept of a user's file does not outlive it."""
    (tmp_path / "own/model").mkdir(parents=True)
    for n_head in (2, 8):
        (tmp_path / "own/model/mine.yaml").write_text(f"# @package _global_\nn_head: {n_head}\n")
        (point,) = compose.points(["data=pydoc", "model=mine"], extra=tmp_path / "own")
        assert point.config.n_head == n_head


def test_what_changes_while_it_is_composed_is_not_kept(cache, tmp_path, monkeypatch):
    """Hydra read the old file or the new one; kept under the old one's hash it would come back with the old file."""
    own, real = tmp_path / "own", composed.fresh
    (own / "model").mkdir(parents=True)
    before, after = (f"# @package _global_\nn_head: {n}\n" for n in (2, 8))
    (file := own / "model/mine.yaml").write_text(before)

    def edited(*args):
        file.write_text(after)
        return real(*args)

    monkeypatch.setattr(composed, "fresh", edited)
    assert composed.composed(["model=mine"], own)[0]["n_head"] == 8 and not cache.exists()
    monkeypatch.setattr(composed, "fresh", real)
    for text, n_head in ((before, 2), (after, 8), (before, 2)):
        file.write_text(text)
        assert composed.composed(["model=mine"], own)[0]["n_head"] == n_head


@pytest.mark.parametrize("body", [b"3", b"[]", b"[1, 2]", b'["ab", "cd"]', b'{"a": {}, "b": {}}', b"[{}, {}, {}]"])
def test_a_composition_of_another_shape_is_made_again(cache, body):
    """Also where its checksum is right."""
    first = composed.composed([])
    (file,) = cache.iterdir()
    good = file.read_bytes()
    file.write_bytes(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
    assert composed.composed([]) == first and file.read_bytes() == good


def test_a_package_that_is_not_installed_has_no_version(cache, monkeypatch):
    """As where toymha runs from its source tree: a composition is kept all the same."""
    monkeypatch.setattr(composed, "MADE_BY", ("hydra-core", "no-such-package"))
    assert composed.composed([])[0]["n_head"] == 4 and len(list(cache.iterdir())) == 1


@pytest.mark.parametrize("damage", [b"", b"nonsense", b"\xff\n{}", None])
def test_a_damaged_composition_is_made_again(cache, monkeypatch, damage):
    """Cut off, overwritten, or with one number changed: it is composed, and kept again."""
    first = composed.composed([])
    (file,) = cache.iterdir()
    good = file.read_bytes()
    file.write_bytes(good.replace(b'"n_head": 4', b'"n_head": 8') if damage is None else damage)
    assert file.read_bytes() != good
    assert composed.composed([]) == first and file.read_bytes() == good
    no_hydra(monkeypatch)
    assert composed.composed([]) == first


def test_a_cache_folder_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file, where the folder would be")
    monkeypatch.setenv("TOYMHA_CACHE", str(tmp_path / "cache"))
    assert composed.composed([])[0]["n_head"] == 4 == composed.composed([])[0]["n_head"]


@pytest.mark.parametrize(
    "text", ["name: ${oc.env:TOYMHA_TEST}\n", "d_ff: !!binary aGVsbG8=\n", "sweep: {seeds: {1: 2}}\n"]
)
def test_what_no_file_says_or_no_file_can_hold_is_not_kept(cache, tmp_path, text):
    """A value from the environment, bytes, a table with numbers for keys: composed each time, to the same."""
    (tmp_path / "own/model").mkdir(parents=True)
    (tmp_path / "own/model/mine.yaml").write_text("# @package _global_\n" + text)
    twice = [composed.composed(["model=mine"], tmp_path / "own") for _ in range(2)]
    assert repr(twice[0]) == repr(twice[1]) == repr(composed.fresh(["model=mine"], tmp_path / "own"))
    assert not cache.exists()


def test_a_folder_that_is_no_folder_of_configs_is_not_read_whole(cache, tmp_path, monkeypatch):
    """--config-dir=. in a place with many files: composed as before, and nothing is kept."""
    (tmp_path / "own/model").mkdir(parents=True)
    (tmp_path / "own/model/mine.yaml").write_text("# @package _global_\nn_head: 2\n")
    for i in range(50):
        (tmp_path / f"own/{i}.txt").touch()
    assert composed.key([], tmp_path / "own", None)
    monkeypatch.setattr(composed, "MOST_FILES", 100)
    assert composed.key([], tmp_path / "own", None)
    for i in range(50, 110):
        (tmp_path / f"own/{i}.txt").touch()
    assert composed.key([], tmp_path / "own", None) is None
    assert composed.composed(["model=mine"], tmp_path / "own")[0]["n_head"] == 2 and not cache.exists()


# Identity


def changed(name: str, hint: typing.Any, value: typing.Any) -> typing.Any:
    """Another value of the key's type."""
    f, _ = config.keys()[name]
    if f.metadata["choices"]:
        return next(c for c in f.metadata["choices"] if c != value)
    if isinstance(value, bool) or hint == bool | None:
        return not value
    if isinstance(value, (int, float)):
        return value + 1 if isinstance(value, int) else value + 0.001
    if isinstance(value, list):
        return [*value[1:], *value[:1]]
    kinds = [t for t in (*typing.get_args(hint), hint) if t in (int, float, str)]
    if not kinds:
        return [[0], [1]]  # kept_heads
    return {int: 7, float: 0.5, str: "other"}[kinds[0]]


def with_value(c: Config, name: str, value: typing.Any) -> Config:
    """A copy with one key changed, past all checks of combinations."""
    c = copy.deepcopy(c)
    *sections, last = name.split(".")
    target = c
    for s in sections:
        target = getattr(target, s)
    object.__setattr__(target, last, value)
    return c


@pytest.mark.parametrize("name", [k for k in sorted(config.keys()) if not k.startswith("sweep.")])
def test_identity_counts_every_key_but_output_and_machine(name, monkeypatch):
    """Each key of the schema makes another run, except those that say where it goes and what it runs on."""
    monkeypatch.setattr(runs, "weights_sha256", lambda path: f"of {path}")
    c = one().config
    _, hint = config.keys()[name]
    other = with_value(c, name, changed(name, hint, compose._get(config.plain(c), name)))
    assert other != c
    same = runs.identity(other, "text") == runs.identity(c, "text")
    assert same == (name in NOT_IDENTITY)


def test_identity_counts_the_text_and_not_its_path():
    """Another text is another run; the same text in another place is the same."""
    a, b = (compose.points(["data=file", f"data.path={p}"])[0].config for p in ("a.txt", "x/b.txt"))
    assert runs.identity(a, "1") == runs.identity(b, "1") != runs.identity(a, "2")


def test_identity_survives_the_config_file():
    """config.yaml read back is the same config."""
    c = one("optim.lr=1e-5", "data.split=[0.8,0.2]", "budget.minutes=1").config
    again = config.build(yaml.safe_load(yaml.safe_dump(config.plain(c))))
    assert again == c and runs.identity(again, "t") == runs.identity(c, "t")


# Imports


def modules_after(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_reading_results_needs_no_torch():
    """report, config, stats, cost and runs leave torch alone."""
    there = modules_after("import toymha.report, toymha.config, toymha.stats, toymha.cost, toymha.runs")
    assert not there & {"torch", "hydra", "tensorboard"}


def test_cost_needs_no_torch():
    """A model whose vocabulary is known is accounted for without torch or numpy."""
    cost = "main(['cost', 'model=llama2_70b', 'seq_len=4096'])"
    silent = "import contextlib, io; quiet = contextlib.redirect_stdout(io.StringIO())"
    run = f"from toymha.cli import main; quiet.__enter__(); {cost}; {cost}; quiet.__exit__(None, None, None)"
    there = modules_after(f"{silent}; {run}")
    assert "toymha.cost" in there and not there & {"torch", "numpy", "scipy", "tensorboard"}


def test_the_command_line_starts_light():
    """toymha.cli imports neither torch nor hydra nor omegaconf."""
    assert not modules_after("import toymha.cli") & {"torch", "hydra", "omegaconf", "numpy", "scipy"}


# Words are read without Hydra where they are plain


def test_plain_values_are_read_as_hydra_reads_them():
    """Numbers, constants and names, one or several, are what Hydra's grammar makes of them; all else is left to it."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parser, generator = OverridesParser.create(), random.Random(0)
    letters = "0123456789-+.eE_aNnTtrueflsi,"
    texts = ["".join(generator.choice(letters) for _ in range(generator.randint(1, 6))) for _ in range(1500)]
    texts += "1 -0 1e5 1E-4 0.5 TRUE Null nan -inf a_b 1_000 01 1. E _ a-b".split()
    texts += "true,false 1e-3,0.001 -0.0 1e400 a,1.5,null".split()
    plain = 0
    for text in texts:
        if not words.is_plain(text):
            continue
        plain += 1
        override = parser.parse_override(f"a={text}")
        if override.is_sweep_override():
            items = [parser.parse_override(f"a={item}").value() for item in override.sweep_string_iterator()]
            expected: tuple = tuple(items), True
        else:
            expected = (override.value(),), False
        assert repr(words._values(f"a={text}")) == repr(expected)
    assert plain > 300


@pytest.mark.parametrize(
    "other, key",
    [
        ("budget=smoke", "budget.steps"),
        ("budget=full", "budget.steps"),
        ("optim=adamw", "optim.lr"),
        ("sweep=heads", "optim.muon_lr"),
        ("model=gpt2_small", "n_layer"),
    ],
)
def test_a_recipe_does_not_outvote_what_is_typed(other, key):
    """Nor the other way round: one line says which two contradict each other."""
    with pytest.raises(UserError, match=rf"^recipe=nano sets {key}, and so does {other}; leave one of them out"):
        compose.points(["recipe=nano", "data=pydoc", other])


@pytest.mark.parametrize("model", ["single", "mqa", "rms"])
def test_a_recipe_leaves_the_heads_to_the_model(model):
    """A model that says nothing of the recipe's sizes goes with it, and single keys win."""
    (alone,), (both,) = compose.points([f"model={model}"]), compose.points([f"model={model}", "recipe=nano", "dim=32"])
    heads = [(p.config.n_head, p.config.n_kv_head, p.config.norm) for p in (alone, both)]
    assert heads[0] == heads[1] and both.config.dim == 32 and both.config.budget.steps == 280


@pytest.mark.parametrize("group", ["recipe", "sweep"])
def test_null_is_no_recipe_and_no_sweep(group):
    """Typed, it is as if nothing was said; beside others it is a value like them."""
    (default,), (null,) = compose.points(["data=pydoc"]), compose.points(["data=pydoc", f"{group}=null"])
    assert null.config == default.config and null.label == default.label
    if group == "recipe":
        both = compose.points(["data=pydoc", "recipe=null,nano"], True)
        assert [p.config.dim for p in both] == [128, 64]
