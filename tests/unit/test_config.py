"""Settings: where they come from, what is refused, and that each is documented."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.rows import every
from tools.settings_reference import page, sentences

from penstock.config import Pool, Settings, UnknownTopics, load
from penstock.core.errors import Misconfigured
from penstock.ports.store import Durability

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def from_toml(text: str, environ: Mapping[str, str] | None = None, **flags: Any) -> Settings:
    Path("penstock.toml").write_text(text)
    return load(environ=environ or {}, flags=flags)


def refusal(text: str = "", environ: Mapping[str, str] | None = None, **flags: Any) -> str:
    with pytest.raises(Misconfigured) as refused:
        from_toml(text, environ, **flags)
    return str(refused.value)


# Where they come from


def test_with_nothing_said_the_defaults_hold() -> None:
    settings = load(environ={})
    assert settings == Settings()
    assert settings.data_dir.is_absolute()
    assert settings.data_dir.name == "penstock"
    assert settings.durability is Durability.DISK
    assert settings.unknown_topics is UnknownTopics.REFUSE


def test_the_defaults_are_themselves_allowed(tmp_path: Path) -> None:
    default = Settings(data_dir=tmp_path)
    said = {name: getattr(default, name) for name in Settings.__struct_fields__}
    assert load(environ={}, flags=said) == default


def test_flags_win_over_environment_and_environment_over_file() -> None:
    text, environ = "lease = 10\nkill_grace = 10\nconcurrency = 10", {"PENSTOCK_LEASE": "20"}
    environ["PENSTOCK_CONCURRENCY"] = "20"
    settings = from_toml(text, environ, concurrency=30, kill_grace=None)
    assert (settings.kill_grace, settings.lease, settings.concurrency) == (10, 20, 30)


def test_a_whole_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "rules.toml").write_text("")
    settings = from_toml(
        """
        data_dir = "data"
        durability = "os"
        listen = ["unix:", "tcp://127.0.0.1:7070", "tcp://[::1]:7070"]
        rules = "rules.toml"
        unknown_topics = "hold"
        sources = ["s3://bucket/in", "file:///srv/inputs"]
        timeout = 60

        [pools.gpu]
        topics = ["job.train.*"]
        capacity = 4
        labels = { gpu = "a100" }

        [pools.default]
        """
    )
    assert settings.data_dir == tmp_path / "data"
    assert settings.rules == tmp_path / "rules.toml"
    assert settings.timeout == 60.0
    assert settings.pools == {
        "gpu": Pool(("job.train.*",), 4, {"gpu": "a100"}),
        "default": Pool(),
    }
    assert settings.durability is Durability.OS
    assert settings.unknown_topics is UnknownTopics.HOLD


def test_everything_can_be_said_in_the_environment(tmp_path: Path) -> None:
    settings = load(
        environ={
            "PENSTOCK_DATA_DIR": "~/x",
            "PENSTOCK_LISTEN": "unix:, tcp://localhost:1",
            "PENSTOCK_SOURCES": '["s3://bucket/a,b"]',
            "PENSTOCK_POOLS": '{"gpu": {"capacity": 2}}',
            "PENSTOCK_RETENTION": "0",
            "PENSTOCK_DURABILITY": "memory",
            "PENSTOCK_X_ANYTHING": "of a plug-in",
            "PENSTOCK_FAILPOINT": "before-commit",
            "HOME": "elsewhere",
        }
    )
    assert settings.data_dir == Path(os.path.realpath(Path.home() / "x"))
    assert settings.listen == ("unix:", "tcp://localhost:1")
    assert settings.sources == ("s3://bucket/a,b",)
    assert settings.pools == {"gpu": Pool(capacity=2)}
    assert settings.retention == 0
    assert settings.durability is Durability.MEMORY


def test_relative_paths_in_a_file_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "my.toml").write_text('data_dir = "data"')
    assert load(Path("etc/my.toml"), {}).data_dir == tmp_path / "etc" / "data"
    assert load(None, {"PENSTOCK_CONFIG": "etc/my.toml"}).data_dir == tmp_path / "etc" / "data"
    assert load(None, {}, {"data_dir": "data"}).data_dir == tmp_path / "data"


def test_a_data_dir_reached_through_a_link_is_the_same_data_dir(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    settings = [load(None, {}, {"data_dir": name}) for name in ("real", tmp_path / "link")]
    assert settings[0] == settings[1]


# What is refused


def test_a_file_that_was_named_must_be_there() -> None:
    with pytest.raises(Misconfigured, match=r"none\.toml: can't be read: No such file"):
        load(Path("none.toml"), {})
    assert "can't be read" in refusal(environ={"PENSTOCK_CONFIG": "none.toml"})


@pytest.mark.parametrize("content", [b"lease = ", b"a = 1\na = 2", b"lease = '\xff'"])
def test_a_file_that_is_not_toml_is_refused_with_its_fault(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "penstock.toml").write_bytes(content)
    with pytest.raises(Misconfigured, match=r"penstock\.toml: is not valid TOML: .+"):
        load(environ={})


@every(
    "text, said",
    [
        ("x = 1\n", "line 1: there is no setting 'x' (known are "),
        ("\nleese = 1\n", "line 2: there is no setting 'leese' (did you mean lease?)"),
        ("[pool.gpu]\n", "line 1: there is no setting 'pool' (did you mean pools?)"),
        ("lease = 'long'", "line 1: lease: expected float, got str (a number from 1 to 3600)"),
        ("lease = true", "lease: expected float, got bool"),
        ("concurrency = 1.5", "expected int, got float (a whole number from 1 to 10000)"),
        ("durability = 'disc'", 'invalid enum value \'disc\' (one of "disk", "os", "memory")'),
        ("listen = 'unix:'", "listen: expected array, got str (a list of strings)"),
        ("sources = ['s3://b', 3]", "sources.1: expected str, got int"),
        ("pools = 3", "pools: expected object, got int (a table of pools)"),
        (
            "lease = 5\n[pools.a]\n[pools.b]\ncapacity = 0",
            "line 4: pools.b.capacity: expected int >= 1",
        ),
        ("[pools]\na = 3", "line 2: pools.a: expected object, got int"),
        (
            "[pools.a]\n[pools.b]\ncapcity = 1",
            "line 3: pools.b.capcity: unknown key (did you mean capacity?)",
        ),
        ("[pools.a]\nlabels = {x = 1}", "line 2: pools.a.labels: expected str, got int"),
        ("[pools.'a b']", "'a b' is not a valid name"),
        ("[pools.a]\ntopics = ['job text']", "a.topics: 'job text' is no topic or glob"),
        ("data_dir = 3", "data_dir: 3 is not a path"),
        ("data_dir = ''", "data_dir: '' is not a path"),
        ("data_dir = 'penstock.toml'", "penstock.toml is not a folder"),
        ("rules = 'none.toml'", "rules: there is no file"),
    ],
)
def test_a_wrong_key_or_type_is_refused_with_its_place(text: str, said: str) -> None:
    message = refusal(text)
    assert message.startswith("penstock.toml")
    assert said in message


@every("value", ["0", "-1", "nan", "inf", "-inf", "1e300"])
@every(
    "name",
    ["timeout", "dispatch_timeout", "lease", "max_attempts", "max_input", "max_result"],
)
def test_absurd_numbers_are_refused(name: str, value: str) -> None:
    message = refusal(f"{name} = {value}")
    assert f"line 1: {name}: " in message
    assert "number from" in message


@pytest.mark.parametrize("name", ["lost_grace", "kill_grace", "retention", "inline_limit"])
def test_zero_is_allowed_where_it_means_something(name: str) -> None:
    assert getattr(from_toml(f"{name} = 0"), name) == 0
    assert name in refusal(f"{name} = -1")


def test_what_kubernetes_tells_of_a_service_called_penstock_is_no_setting() -> None:
    told = {
        "PENSTOCK_SERVICE_HOST": "10.0.0.11",
        "PENSTOCK_SERVICE_PORT": "8700",
        "PENSTOCK_SERVICE_PORT_HTTP": "8700",
        "PENSTOCK_PORT": "tcp://10.0.0.11:8700",
        "PENSTOCK_PORT_8700_TCP": "tcp://10.0.0.11:8700",
        "PENSTOCK_PORT_8700_TCP_PROTO": "tcp",
        "PENSTOCK_PORT_8700_TCP_PORT": "8700",
        "PENSTOCK_PORT_8700_TCP_ADDR": "10.0.0.11",
        "PENSTOCK_API_SERVICE_HOST": "10.0.0.12",
        "PENSTOCK_API_PORT": "tcp://10.0.0.12:8700",
    }
    assert load(environ=told) == load(environ={})
    assert "http_port" in refusal("", {"PENSTOCK_HTTP_PORT": "8700"})


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"PENSTOCK_LEASE": "soon"}, "PENSTOCK_LEASE: lease: "),
        ({"PENSTOCK_LEASE": ""}, "PENSTOCK_LEASE: lease: "),
        ({"PENSTOCK_DATADIR": "x"}, "PENSTOCK_DATADIR: there is no setting 'datadir'"),
        ({"PENSTOCK_POOLS": "gpu"}, "PENSTOCK_POOLS: pools: is not valid JSON"),
        ({"PENSTOCK_POOLS": "[]"}, "PENSTOCK_POOLS: pools: expected object"),
        ({"PENSTOCK_LISTEN": "[1]"}, "PENSTOCK_LISTEN: listen.0: expected str"),
    ],
)
def test_a_wrong_variable_is_refused_by_name(environ: dict[str, str], said: str) -> None:
    assert refusal("", environ).startswith(said)


def test_a_wrong_flag_is_refused_by_name() -> None:
    assert refusal(lease=-1).startswith("option lease: lease: expected float >= 1")
    assert "did you mean timeout?" in refusal(timout=1)


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("/tmp/x.sock", "is not unix:"),
        ("http://127.0.0.1:80", "is not unix:"),
        ("unix:relative.sock", "not an absolute path"),
        ("unix:/" + "x" * 103, "longer than the 103 bytes"),
        ("tcp://127.0.0.1", "with a port"),
        ("tcp://127.0.0.1:99999", "with a port"),
        ("tcp://127.0.0.1:http", "with a port"),
        ("tcp://127.0.0.1:80/path", "with a port"),
        ("tcp://0.0.0.0:80", "not on this machine's loopback"),
        ("tcp://example.com:80", "not on this machine's loopback"),
    ],
)
def test_an_address_that_is_malformed_or_not_local_is_refused(address: str, said: str) -> None:
    assert said in refusal(f"listen = [{address!r}]")


def test_an_engine_must_listen_somewhere() -> None:
    assert "names no address" in refusal("listen = []")


@pytest.mark.parametrize("source", ["https:", "local:///x", "https://host/a/../b", "/folder"])
def test_a_source_that_is_not_safe_is_refused(source: str) -> None:
    assert "line 1: sources: " in refusal(f"sources = [{source!r}]")


@pytest.mark.parametrize("source", [".", "..", "data"])
def test_a_source_that_holds_the_data_directory_is_refused(tmp_path: Path, source: str) -> None:
    folder = (tmp_path / source).resolve().as_uri()
    message = refusal(f"data_dir = 'data'\nsources = [{folder!r}]")
    assert "line 2: sources: " in message
    assert "token" in message


def test_settings_that_do_not_go_together_are_refused() -> None:
    assert "line 1: lost_grace: is longer than the lease (15)" in refusal("lost_grace = 16")
    assert "lost_grace" in refusal(lease=2)
    assert "max_input: is less than inline_limit" in refusal("max_input = 100")


@given(
    st.dictionaries(
        st.sampled_from(Settings.__struct_fields__),
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just([]),
    )
)
def test_any_flags_give_settings_or_a_clear_refusal(flags: dict[str, Any]) -> None:
    try:
        assert isinstance(load(environ={}, flags=flags), Settings)
    except Misconfigured as refused:
        assert any(name in refused.message for name in Settings.__struct_fields__)  # noqa: PT017


# Where an engine keeps its things


def test_paths_lie_in_the_data_directory(tmp_path: Path) -> None:
    settings = Settings(data_dir=Path("/data"))
    assert settings.database == Path("/data/penstock.db")
    assert settings.blobs == Path("/data/blobs")
    assert settings.token_file == Path("/data/token")
    assert settings.socket == Path("/data/penstock.sock")
    assert settings.addresses == ("unix:/data/penstock.sock",)
    assert settings.allowed_sources == ("file:///data/files",)


def test_a_long_data_directory_has_its_socket_elsewhere_and_always_at_the_same_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    long, other = Path("/", "ä" * 60), Path("/", "ö" * 60)
    socket = Settings(data_dir=long).socket
    monkeypatch.setenv("TMPDIR", "/elsewhere")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/elsewhere")
    assert socket == Settings(data_dir=long).socket
    assert socket != Settings(data_dir=other).socket
    assert len(os.fsencode(socket)) <= 103
    assert socket.parent.name == f"penstock-{os.getuid()}"


def test_the_longest_socket_path_can_really_be_bound(tmp_path: Path) -> None:
    import socket

    folder = tmp_path / "d"
    room = 103 - len(os.fsencode(folder)) - len("//penstock.sock")
    if room < 1:
        pytest.skip("the temporary folder's own path is too long")
    settings = Settings(data_dir=folder / ("x" * room))
    settings.data_dir.mkdir(parents=True)
    assert settings.socket.parent == settings.data_dir
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(settings.socket))
        assert stat.S_ISSOCK(settings.socket.stat().st_mode)


# Documentation


def test_every_setting_says_in_a_sentence_what_it_is() -> None:
    for kind in (Settings, Pool):
        said = sentences(kind)
        assert set(said) == set(kind.__struct_fields__)
        assert all(text.endswith(".") for text in said.values())


def test_the_reference_page_is_in_step_with_the_code() -> None:
    written = (DOCS / "reference" / "settings.md").read_text()
    assert written == page(), "run: python tools/settings_reference.py > docs/reference/settings.md"


def test_the_example_on_the_reference_page_can_be_loaded() -> None:
    example = page().split("```toml\n")[1].split("```")[0]
    assert from_toml(example).pools["gpu"].capacity == 4
