"""The oci engine's images: brought in whole and safely, found by any of their names."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gzip
import hashlib
import io
import json
import os
import shutil
import stat
import tarfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import needs_runtime

from penstock.testing.aio import run_async
from penstock.workloads.container.engine import EngineError, ImageNotFound, RegistryAuth
from penstock.workloads.container.engines.oci.bundle import MOUNT_POINTS
from penstock.workloads.container.engines.oci.engine import OciEngine
from penstock.workloads.container.engines.oci.images import BadImage, ImageStore


@pytest.fixture(autouse=True)
def tools() -> None:
    for name in ("skopeo", "umoci"):
        needs_runtime(name)


Member = tuple[str, str | bytes | None]
"""A name, and contents; None is a folder, and text that begins with `->` a link."""


def member(name: str, **others: Any) -> tarfile.TarInfo:
    found = tarfile.TarInfo(name)
    for key, value in others.items():
        setattr(found, key, value)
    return found


def tarred(members: Iterable[Member | tarfile.TarInfo]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for each in members:
            if isinstance(each, tarfile.TarInfo):
                archive.addfile(each)
                continue
            name, contents = each
            if contents is None:
                archive.addfile(member(name, type=tarfile.DIRTYPE, mode=0o755))
            elif isinstance(contents, str) and contents.startswith("->"):
                archive.addfile(member(name, type=tarfile.SYMTYPE, linkname=contents[2:]))
            else:
                data = contents.encode() if isinstance(contents, str) else contents
                archive.addfile(member(name, size=len(data), mode=0o644), io.BytesIO(data))
    return packed.getvalue()


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def config_of(layers: list[bytes], **config: Any) -> bytes:
    diff_ids = [digest(layer) for layer in layers]
    return json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": config,
            "rootfs": {"type": "layers", "diff_ids": diff_ids},
            "history": [{"created_by": "test"} for _ in layers],
        }
    ).encode()


def docker_save(
    folder: Path,
    layers: list[bytes],
    tags: Iterable[str] = ("tool:1",),
    pack: Callable[[bytes], bytes] = bytes,
    **config: Any,
) -> Path:
    data = config_of(layers, **config)
    names = [f"{n}/layer.tar" for n in range(len(layers))]
    manifest = [{"Config": "config.json", "RepoTags": list(tags), "Layers": names}]
    members: list[Member] = [("manifest.json", json.dumps(manifest)), ("config.json", data)]
    members += [(name, pack(layer)) for name, layer in zip(names, layers, strict=True)]
    path = folder / "saved.tar"
    path.write_bytes(tarred(members))
    return path


def oci_archive(folder: Path, layers: list[bytes], name: str = "tool:2") -> tuple[Path, str]:
    blobs: dict[str, bytes] = {}

    def blob(data: bytes, kind: str) -> dict[str, Any]:
        blobs[digest(data)] = data
        kind = f"application/vnd.oci.image.{kind}"
        return {"mediaType": kind, "digest": digest(data), "size": len(data)}

    config = blob(config_of(layers, Entrypoint=["/bin/tool"]), "config.v1+json")
    packed = [blob(gzip.compress(layer), "layer.v1.tar+gzip") for layer in layers]
    about = {"schemaVersion": 2, "config": config, "layers": packed}
    manifest = blob(json.dumps(about).encode(), "manifest.v1+json")
    entry = {**manifest, "annotations": {"org.opencontainers.image.ref.name": name}}
    members: list[Member] = [
        ("oci-layout", '{"imageLayoutVersion": "1.0.0"}'),
        ("index.json", json.dumps({"schemaVersion": 2, "manifests": [entry]})),
    ]
    members += [(f"blobs/sha256/{key[7:]}", data) for key, data in blobs.items()]
    path = folder / "oci.tar"
    path.write_bytes(tarred(members))
    return path, manifest["digest"]


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "images")


def import_tar(store: ImageStore, tmp_path: Path, members: Iterable[Any]) -> Path:
    """The root file system that becomes of an archive."""
    path = tmp_path / "root.tar"
    path.write_bytes(tarred(members))
    return store.rootfs(store.import_tree(path, "imported"))


def left(store: ImageStore) -> list[str]:
    return sorted(name for name in os.listdir(store.root) if name not in (".lock", "tags.json"))


# -- bringing in ----------------------------------------------------------------


def test_a_folder_becomes_an_image(store: ImageStore, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "bin").mkdir(parents=True)
    (tree / "bin" / "tool").write_text("x")
    (tree / "bin" / "tool").chmod(0o4755)
    (tree / "bin" / "alias").symlink_to("/bin/tool")
    os.mkfifo(tree / "pipe")
    image = store.import_tree(tree, "mine", cmd=("/bin/tool",), env=("A=b",))
    root = store.rootfs(image)
    assert (image.tags, image.cmd, image.env) == (("mine:latest",), ("/bin/tool",), ("A=b",))
    assert (root / "bin" / "tool").read_text() == "x"
    assert stat.S_IMODE((root / "bin" / "tool").stat().st_mode) == 0o755
    assert os.readlink(root / "bin" / "alias") == "/bin/tool"
    assert not (root / "pipe").exists()
    assert image.size == 1 + 3 * 512  # an entry counts too


def test_the_same_contents_are_the_same_image(store: ImageStore, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "a").write_text("x")
    first = store.import_tree(tree, "one")
    second = store.import_tree(tree, "two")
    assert first.id == second.id
    assert second.tags == ("one:latest", "two:latest")
    (tree / "a").write_text("y")
    assert store.import_tree(tree, "one").id != first.id
    assert store.find("two").id == first.id


def test_every_image_has_places_for_mounts(store: ImageStore, tmp_path: Path) -> None:
    members: list[Member] = [("var/tmp", None), ("tmp", "->/var/tmp"), ("dev", "a file")]
    root = import_tar(store, tmp_path, members)
    for point in MOUNT_POINTS:
        assert (root / point).is_symlink() or (root / point).is_dir()
    assert os.readlink(root / "tmp") == "/var/tmp"
    assert "localhost" in (root / "etc/hosts").read_text()


def test_a_saved_image_keeps_its_configuration(store: ImageStore, tmp_path: Path) -> None:
    layers = [tarred([("a", "1")]), tarred([("b", "2")])]
    path = docker_save(
        tmp_path,
        layers,
        tags=("tool:1", "tool:new"),
        Entrypoint=["/e"],
        Cmd=["c"],
        Env=["A=1"],
        WorkingDir="/w",
        Labels={"k": "v"},
    )
    image = store.load(path)
    assert image.tags == ("tool:1", "tool:new")
    assert (image.entrypoint, image.cmd, image.env) == (("/e",), ("c",), ("A=1",))
    assert (image.workdir, image.labels) == ("/w", {"k": "v"})
    assert (store.rootfs(image) / "b").read_text() == "2"
    assert store.load(path, "other").tags == ("other:latest", "tool:1", "tool:new")


@pytest.mark.parametrize("pack", [gzip.compress, bytes])
def test_layers_may_be_compressed(
    store: ImageStore, tmp_path: Path, pack: Callable[[bytes], bytes]
) -> None:
    image = store.load(docker_save(tmp_path, [tarred([("a", "1")])], pack=pack))
    assert (store.rootfs(image) / "a").read_text() == "1"


def test_an_oci_archive_is_an_image_too(store: ImageStore, tmp_path: Path) -> None:
    path, _ = oci_archive(tmp_path, [tarred([("a", "1")])])
    image = store.load(path)
    assert image.tags == ("tool:2",)
    assert image.entrypoint == ("/bin/tool",)
    assert store.load(path, "place/tool:3").tags == ("place/tool:3", "tool:2")


def test_a_link_of_an_older_layer_is_followed_inside_only(
    store: ImageStore, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    layers = [
        tarred([("usr/lib", None), ("lib", "->usr/lib"), ("out", f"->{outside}")]),
        tarred([("lib/a", "1"), ("out/b", "2")]),
    ]
    root = store.rootfs(store.load(docker_save(tmp_path, layers)))
    assert (root / "usr/lib/a").read_text() == "1"
    assert os.listdir(outside) == []
    assert (root / str(outside).lstrip("/") / "b").read_text() == "2"


def test_whiteouts_hide_what_older_layers_brought(store: ImageStore, tmp_path: Path) -> None:
    layers = [
        tarred([("keep", "k"), ("gone", "g"), ("dir/old", "o"), ("dir/sub/old", "o")]),
        tarred([(".wh.gone", ""), ("dir/new", "n"), ("dir/.wh..wh..opq", "")]),
    ]
    root = store.rootfs(store.load(docker_save(tmp_path, layers)))
    assert (root / "keep").exists()
    assert not (root / "gone").exists()
    assert os.listdir(root / "dir") == ["new"]
    assert not [name for _, _, names in os.walk(root) for name in names if name.startswith(".wh")]


def test_a_whiteout_does_not_reach_outside(store: ImageStore, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file").touch()
    for whiteouts in (["out/.wh.file"], ["out/.wh..wh..opq"], [".wh..."], ["out/.wh..."], [".wh."]):
        hidden = tarred([(name, "") for name in whiteouts])
        with contextlib.suppress(BadImage):
            store.load(docker_save(tmp_path, [tarred([("out", f"->{victim}")]), hidden]))
        assert (victim / "file").exists()
        assert len(left(store)) == len(store.list())


def test_a_later_layer_may_change_what_something_is(store: ImageStore, tmp_path: Path) -> None:
    layers = [
        tarred([("a/b", "file below"), ("c", "file")]),
        tarred([("a", "now a file"), ("c", None)]),
        tarred([("c", "->a")]),
    ]
    root = store.rootfs(store.load(docker_save(tmp_path, layers)))
    assert (root / "a").read_text() == "now a file"
    assert os.readlink(root / "c") == "a"


def test_hard_links_stay_inside(store: ImageStore, tmp_path: Path) -> None:
    link = member("b", type=tarfile.LNKTYPE, linkname="a")
    root = import_tar(store, tmp_path, [("a", "1"), link])
    assert (root / "a").stat().st_ino == (root / "b").stat().st_ino


def test_devices_and_pipes_are_left_out(store: ImageStore, tmp_path: Path) -> None:
    members = [
        member("disk", type=tarfile.BLKTYPE, devmajor=8, devminor=0),
        member("zero", type=tarfile.CHRTYPE, devmajor=1, devminor=5),
        member("pipe", type=tarfile.FIFOTYPE),
        ("a", "1"),
    ]
    root = import_tar(store, tmp_path, members)
    assert (root / "a").exists()
    assert not any((root / name).exists() for name in ("disk", "zero", "pipe"))


# -- what is refused ------------------------------------------------------------


@pytest.mark.parametrize("bring", ["load", "import"])
@pytest.mark.parametrize(
    "bad",
    [
        ("/escape", "x"),
        ("../escape", "x"),
        ("a/../../escape", "x"),
        member("b", type=tarfile.LNKTYPE, linkname="../../victim"),
        member("b", type=tarfile.LNKTYPE, linkname="/victim"),
        member("b", type=tarfile.LNKTYPE, linkname=""),
        [("b", "->.."), ("b/escape", "x")],
        [("b", "->b"), ("b/c", "x")],
    ],
    ids=["absolute", "climbs", "climbs-later", "link-up", "link-out", "link-none", "link", "loop"],
)
def test_nothing_of_an_archive_leads_outside(
    store: ImageStore, tmp_path: Path, bad: Any, bring: str
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("v")
    members = [("good", "1"), *(bad if isinstance(bad, list) else [bad])]
    with contextlib.suppress(BadImage):
        if bring == "import":
            import_tar(store, tmp_path, members)
        else:
            store.load(docker_save(tmp_path, [tarred(members)]))
    assert (victim.read_text(), victim.stat().st_nlink) == ("v", 1)
    assert not Path("/escape").exists()
    outside = [path for path in tmp_path.rglob("escape") if "rootfs" not in path.parts]
    assert outside == []
    assert len(left(store)) == len(store.list())


def test_a_damaged_layer_is_refused(store: ImageStore, tmp_path: Path) -> None:
    path = docker_save(tmp_path, [tarred([("a", "1")])], pack=lambda _: tarred([("a", "2")]))
    with pytest.raises(BadImage):
        store.load(path)
    assert left(store) == []


def test_a_layer_that_is_cut_off_is_refused(store: ImageStore, tmp_path: Path) -> None:
    layer = tarred([("a", os.urandom(50_000))])
    for pack in (lambda data: gzip.compress(data)[:-9000], lambda data: data[:20_000]):
        with pytest.raises(BadImage):
            store.load(docker_save(tmp_path, [layer], pack=pack))
    assert left(store) == []


def test_what_is_no_image_is_refused(store: ImageStore, tmp_path: Path) -> None:
    path = tmp_path / "file"
    for data in (b"", b"no archive", tarred([("a", "1")]), tarred([("manifest.json", "[{}]")])):
        path.write_bytes(data)
        with pytest.raises(BadImage):
            store.load(path)
    for text in ("[]", "{", '[{"Config": "x", "Layers": []}]', '{"Config": 1}', "7"):
        path.write_bytes(tarred([("manifest.json", text)]))
        with pytest.raises(BadImage):
            store.load(path)


def test_a_blob_with_other_contents_is_refused(store: ImageStore, tmp_path: Path) -> None:
    path, manifest = oci_archive(tmp_path, [tarred([("a", "1")])])
    data = path.read_bytes().replace(manifest[7:].encode(), ("0" * 64).encode())
    path.write_bytes(data)
    with pytest.raises(BadImage):
        store.load(path)


def test_an_image_has_a_largest_size(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "images", limit=1000)
    with pytest.raises(BadImage, match="larger"):
        import_tar(store, tmp_path, [("a", b"x" * 600), ("b", b"x" * 600)])
    assert left(store) == []


def test_a_name_must_be_one(store: ImageStore, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    for tag in ("-rm", "a b", "", "../x", "a" * 300):
        with pytest.raises(BadImage, match="Invalid image name"):
            store.import_tree(tree, tag)


def test_a_folder_that_holds_the_store_is_refused(store: ImageStore, tmp_path: Path) -> None:
    with pytest.raises(BadImage, match="itself"):
        store.import_tree(tmp_path, "all")


# -- finding and removing -------------------------------------------------------


@pytest.fixture
def loaded(store: ImageStore, tmp_path: Path) -> str:
    tags = ("tool:1", "localhost/built:latest")
    return store.load(docker_save(tmp_path, [tarred([("a", "1")])], tags=tags)).id


def test_an_image_is_found_by_any_of_its_names(store: ImageStore, loaded: str) -> None:
    for name in ("tool:1", "localhost/built", "built", "built:latest", loaded, loaded[7:19]):
        assert store.find(name).id == loaded
    assert [image.id for image in store.list()] == [loaded]


def test_what_is_not_there_is_not_found(store: ImageStore, loaded: str) -> None:
    unknown = ("sha256:" + "0" * 64, "0" * 12, "a@sha256:1")
    for name in ("tool", "tool:2", "", "-x", "../..", "x y", *unknown):
        with pytest.raises(ImageNotFound, match="image load"):
            store.find(name)


def test_a_tag_can_not_pose_as_an_id(store: ImageStore, loaded: str, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with pytest.raises(BadImage):
        store.import_tree(tmp_path / "other", loaded)
    assert store.find(loaded).tags == ("localhost/built:latest", "tool:1")


def test_an_image_goes_with_its_last_name(store: ImageStore, loaded: str) -> None:
    store.remove("tool:1")
    assert store.find(loaded).tags == ("localhost/built:latest",)
    store.remove("localhost/built")
    assert store.list() == ()
    assert left(store) == []
    with pytest.raises(ImageNotFound):
        store.remove("tool:1")


def test_an_image_goes_by_its_id_whatever_its_names(store: ImageStore, loaded: str) -> None:
    store.remove(loaded)
    assert left(store) == []
    with pytest.raises(ImageNotFound):
        store.find("tool:1")


def test_what_a_crash_left_is_cleared_by_the_next_import(
    store: ImageStore, loaded: str, tmp_path: Path
) -> None:
    (store.root / ".new-abandoned" / "rootfs").mkdir(parents=True)
    import_tar(store, tmp_path, [("a", "2")])
    assert len(left(store)) == 2


# -- bombs ------------------------------------------------------------------------------------


def sparse_member(size: int) -> bytes:
    """A tar of one file that is one hole, as GNU tar writes it."""
    header = bytearray(member("big", type=tarfile.GNUTYPE_SPARSE).tobuf(tarfile.GNU_FORMAT))
    for at, number in ((386, size), (398, 0), (483, size)):
        header[at : at + 12] = b"%011o\0" % number
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + bytes(1024)


def test_a_sparse_file_counts_with_its_holes(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "images", limit=1 << 20)
    sparse = sparse_member(32 << 20)
    with pytest.raises(BadImage):
        store.load(docker_save(tmp_path, [sparse]))
    (tmp_path / "root.tar").write_bytes(sparse)
    with pytest.raises(BadImage):
        store.import_tree(tmp_path / "root.tar", "imported")
    assert left(store) == []


def test_a_layer_that_unpacks_to_many_files_is_stopped_on_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ImageStore(tmp_path / "images", limit=1 << 20)
    written = tmp_path / "written"
    program = tmp_path / "bin" / "umoci"
    program.parent.mkdir()
    program.write_text(
        "#!/bin/sh\nfor last; do :; done\nmkdir $last; n=0\n"
        f"while :; do head -c 99999 /dev/zero > $last/$n; n=$((n+1)); echo $n > {written}; done\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    with pytest.raises(BadImage, match=r"larger than .* \(images.max_bytes\)"):
        store.load(docker_save(tmp_path, [tarred([("a", "1")])]))
    assert written.exists()
    assert left(store) == []


def test_entries_without_content_count_too(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "images", limit=100 * 512)
    with pytest.raises(BadImage, match="larger than"):
        store.load(docker_save(tmp_path, [tarred([(f"d{n}", None) for n in range(101)])]))


def test_the_missing_program_is_named(
    store: ImageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = docker_save(tmp_path, [tarred([("a", "1")])])
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(EngineError, match="apt-get install skopeo umoci"):
        store.load(path)
    with pytest.raises(ImageNotFound, match="apt-get install skopeo umoci"):
        store.pull("team/tool")


# -- from a registry --------------------------------------------------------------------------


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose file `image` is what every registry has."""
    program = tmp_path / "bin" / "skopeo"
    program.parent.mkdir()
    program.write_text(
        "#!/bin/sh\nfor last; do :; done\nexec "
        f'{shutil.which("skopeo")} copy -q --insecure-policy oci-archive:{tmp_path}/image "$last"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    return tmp_path


def offer(registry: Path, contents: str) -> None:
    path, _ = oci_archive(registry, [tarred([("id", contents)])])
    path.rename(registry / "image")


@run_async
async def test_a_pull_by_digest_moves_no_tag(registry: Path, tmp_path: Path) -> None:
    engine = OciEngine(tmp_path / "root")
    offer(registry, "one")
    trusted = await engine.pull("team/tool")
    offer(registry, "two")
    wanted = "sha256:" + "5" * 64
    for reference in (f"team/tool@{wanted}", f"team/tool:latest@{wanted}"):
        other = await engine.pull(reference)
        assert other.id != trusted.id
        assert other.tags == ()
        assert (await engine.image(reference)).id == other.id
        for name in ("team/tool", "team/tool:latest"):
            assert (await engine.image(name)).id == trusted.id


def written_pid(root: Path) -> int:
    while True:
        for path in root.glob("*/started"):
            if text := path.read_text():
                return int(text)
        time.sleep(0.01)


@run_async
async def test_a_pull_that_is_given_up_brings_nothing_in_later(
    registry: Path, tmp_path: Path
) -> None:
    engine = OciEngine(tmp_path / "root")
    offer(registry, "one")
    program = registry / "bin" / "skopeo"
    program.write_text("#!/bin/sh\necho $$ > started\nexec sleep 1000\n")
    pulling = asyncio.ensure_future(engine.pull("team/tool"))
    async with asyncio.timeout(20):
        pid = await asyncio.to_thread(written_pid, engine.store.root)
    engine.store.import_tree(registry / "bin", "other")  # nobody waits for a pull
    pulling.cancel()
    await asyncio.wait((pulling,))
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert [image.tags for image in engine.store.list()] == [("other:latest",)]
    assert len(left(engine.store)) == 1


@run_async
async def test_a_login_goes_to_skopeo_in_a_file_that_nobody_else_can_read(
    registry: Path, tmp_path: Path
) -> None:
    program = registry / "bin" / "skopeo"
    said = tmp_path / "said"
    words = (
        f'[ "$5" = --authfile ] && {{ stat -c %a "$6"; cat "$6"; }} > {said}\necho "$@" >> {said}\n'
    )
    program.write_text(program.read_text().replace("#!/bin/sh\n", f"#!/bin/sh\n{words}"))
    engine = OciEngine(tmp_path / "root")
    offer(registry, "one")
    auth = RegistryAuth(server="registry.test", username="ann", password="se:cret")
    await engine.pull("registry.test/team/tool", auth)
    mode, rest = said.read_text().split("\n", 1)
    login = base64.b64encode(b"ann:se:cret").decode()
    assert mode == "600"
    assert rest.startswith(
        json.dumps({"auths": {"registry.test": {"auth": login}}}, separators=(",", ":"))
    )
    assert "cret" not in rest.partition("copy")[2]
