"""Settings: where they come from, what is refused, and that each is documented."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct
from tests.support.rows import every
from tools.settings_reference import page, sentences

from penstock.config import Pool, Settings, UnknownTopics, load
from penstock.config.loading import RENAMED, SECTIONS, TYPES, load_all
from penstock.core.errors import Misconfigured
from penstock.ports.store import Durability


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
    text = "concurrency = 10\n[timeouts]\nlease = 10\nkill_grace = 10"
    environ = {"PENSTOCK_TIMEOUTS__LEASE": "20", "PENSTOCK_CONCURRENCY": "20"}
    settings = from_toml(text, environ, concurrency=30, timeouts__kill_grace=None)
    timeouts = settings.timeouts
    assert (timeouts.kill_grace, timeouts.lease, settings.concurrency) == (10, 20, 30)


@every(
    "flags",
    [{"http__listen": "[::1]:1"}, {"http.listen": "[::1]:1"}, {"http": {"listen": "[::1]:1"}}],
)
def test_a_setting_of_a_section_is_given_by_both_names(flags: dict[str, Any]) -> None:
    settings = load(environ={"PENSTOCK_HTTP__INSECURE": "true"}, flags=flags)
    assert (settings.http.listen, settings.http.insecure) == ("[::1]:1", True)


def test_a_changed_copy_keeps_all_else(tmp_path: Path) -> None:
    before = Settings(data_dir=tmp_path).changed(http__insecure=True)
    after = before.changed(concurrency=3, http__listen="[::1]:1", http__max_streams=2)
    assert (after.data_dir, after.concurrency) == (tmp_path, 3)
    assert (after.http.listen, after.http.max_streams, after.http.insecure) == ("[::1]:1", 2, True)
    assert before.http.listen == ""


def test_a_whole_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "rules.toml").write_text("")
    settings = from_toml(
        """
        data_dir = "data"
        durability = "os"
        listen = ["unix:", "tcp://127.0.0.1:7070", "tcp://[::1]:7070"]
        rules = "rules.toml"
        unknown_topics = "hold"
        http.listen = "127.0.0.1:7470"

        [storage]
        sources = ["s3://bucket/in", "file:///srv/inputs"]

        [timeouts]
        run = 60

        [pools.gpu]
        topics = ["job.train.*"]
        capacity = 4
        labels = { gpu = "a100" }

        [pools.default]
        """
    )
    assert settings.data_dir == tmp_path / "data"
    assert settings.rules == tmp_path / "rules.toml"
    assert settings.timeouts.run == 60.0
    assert settings.http.listen == "127.0.0.1:7470"
    assert settings.storage.sources[0] == "s3://bucket/in"
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
            "PENSTOCK_STORAGE__SOURCES": '["s3://bucket/a,b"]',
            "PENSTOCK_POOLS": '{"gpu": {"capacity": 2}}',
            "PENSTOCK_STORAGE__RETENTION": "0",
            "PENSTOCK_DURABILITY": "memory",
            "PENSTOCK_X_ANYTHING": "of a plug-in",
            "PENSTOCK_FAILPOINT": "before-commit",
            "HOME": "elsewhere",
        }
    )
    assert settings.data_dir == Path(os.path.realpath(Path.home() / "x"))
    assert settings.listen == ("unix:", "tcp://localhost:1")
    assert settings.storage.sources == ("s3://bucket/a,b",)
    assert settings.pools == {"gpu": Pool(capacity=2)}
    assert settings.storage.retention == 0
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
        (
            "\n[timeouts]\nleese = 1\n",
            "line 3: there is no setting 'timeouts.leese' (did you mean timeouts.lease?)",
        ),
        (
            "[timeouts]\nconcurrency = 1\n",
            "line 2: there is no setting 'timeouts.concurrency' (did you mean concurrency?)",
        ),
        (
            "certificate = 'x'",
            "line 1: there is no setting 'certificate'"
            " (did you mean bus.certificate or http.certificate or link.certificate?)",
        ),
        ("[timeout]\n", "line 1: timeouts.run: expected float, got object"),
        ("[htpp]\nx = 1", "line 1: there is no setting 'htpp' (did you mean http?)"),
        ("timeouts = 3", "line 1: timeouts is a section, not a setting"),
        ("[pool.gpu]\n", "line 1: there is no setting 'pool' (did you mean pools?)"),
        (
            "[timeouts]\nlease = 'long'",
            "line 2: timeouts.lease: expected float, got str (a number from 1 to 3600)",
        ),
        ("timeouts.lease = true", "line 1: timeouts.lease: expected float, got bool"),
        ("concurrency = 1.5", "expected int, got float (a whole number from 1 to 10000)"),
        ("durability = 'disc'", 'invalid enum value \'disc\' (one of "disk", "os", "memory")'),
        ("listen = 'unix:'", "listen: expected array, got str (a list of strings)"),
        ("storage.sources = ['s3://b', 3]", "storage.sources.1: expected str, got int"),
        ("pools = 3", "pools: expected object, got int (a table of pools)"),
        (
            "concurrency = 5\n[pools.a]\n[pools.b]\ncapacity = 0",
            "line 4: pools.b.capacity: expected int >= 1",
        ),
        ("[pools]\na = 3", "line 2: pools.a: expected object, got int"),
        (
            "[pools.a]\n[pools.b]\ncapcity = 1",
            "line 3: pools.b.capcity: unknown key (did you mean capacity?)",
        ),
        ("[pools.a]\nlabels = {x = 1}", "line 2: pools.a.labels: expected str, got int"),
        ("[pools.'a b']", "'a b' is not a valid name"),
        ("[pools.a]\ntopics = ['job text']", "a.topics: 'job text' is not a topic or glob"),
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
    [
        *("timeouts.run", "timeouts.dispatch", "timeouts.lease"),
        *("limits.max_attempts", "limits.max_input", "limits.max_result"),
    ],
)
def test_absurd_numbers_are_refused(name: str, value: str) -> None:
    message = refusal(f"{name} = {value}")
    assert f"line 1: {name}: " in message
    assert "number from" in message


@pytest.mark.parametrize(
    "name",
    ["timeouts.lost_grace", "timeouts.kill_grace", "storage.retention", "storage.inline_limit"],
)
def test_zero_is_allowed_where_it_means_something(name: str) -> None:
    assert attrgetter(name)(from_toml(f"{name} = 0")) == 0
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
    assert load_all(environ=told).ignored == tuple(sorted(told))
    assert "http_port" in refusal("", {"PENSTOCK_HTTP_PORT": "8700"})


def test_a_variable_that_is_like_no_setting_is_somebody_elses() -> None:
    environ = {"PENSTOCK_COLOUR_OF_WATER": "blue", "PENSTOCK_TOKEN": "t", "PENSTOCK_X_MINE": "1"}
    loaded = load_all(environ=environ)
    assert (loaded.settings, loaded.ignored) == (Settings(), ("PENSTOCK_COLOUR_OF_WATER",))


# Where each came from, and by what name


def test_each_setting_has_its_origin() -> None:
    Path("penstock.toml").write_text("concurrency = 3\n[http]\nlisten = '[::1]:1'\n")
    environ = {"PENSTOCK_NODE__LEASE": "7"}
    assert load_all(environ=environ, flags={"durability": "os"}).origins == {
        "concurrency": "penstock.toml, line 1",
        "http.listen": "penstock.toml, line 3",
        "node.lease": "PENSTOCK_NODE__LEASE",
        "durability": "option durability",
    }


def test_a_name_from_before_there_were_sections_is_accepted_with_one_line_that_names_the_new(
    caplog: pytest.LogCaptureFixture,
) -> None:
    text, environ = "http = '[::1]:1'\nretention = 5", {"PENSTOCK_PIPE_CHUNK": "7"}
    for _ in range(2):
        settings = from_toml(text, environ, models=("a",), max_input=9999)
    assert (settings.http.listen, settings.storage.retention) == ("[::1]:1", 5)
    assert (settings.node.prefill_chunk_size, settings.models.serve) == (7, ("a",))
    assert settings.limits.max_input == 9999
    assert caplog.messages == [
        "penstock.toml, line 1: http is now http.listen",
        "penstock.toml, line 2: retention is now storage.retention",
        "PENSTOCK_PIPE_CHUNK: PENSTOCK_PIPE_CHUNK is now PENSTOCK_NODE__PREFILL_CHUNK_SIZE",
        "option models: models is now models.serve",
        "option max_input: max_input is now limits.max_input",
    ]


def test_the_new_name_wins_over_the_old_one() -> None:
    settings = from_toml("", {"PENSTOCK_TIMEOUTS__LEASE": "20", "PENSTOCK_LEASE": "10"})
    assert settings.timeouts.lease == 20


def test_every_old_name_leads_to_a_setting() -> None:
    assert set(RENAMED.values()) <= set(TYPES)
    assert not set(RENAMED) & set(TYPES)


# What is wrong in variables, flags and values


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"PENSTOCK_TIMEOUTS__LEASE": "soon"}, "PENSTOCK_TIMEOUTS__LEASE: timeouts.lease: "),
        ({"PENSTOCK_TIMEOUTS__LEASE": ""}, "PENSTOCK_TIMEOUTS__LEASE: timeouts.lease: "),
        (
            {"PENSTOCK_DATADIR": "x"},
            "PENSTOCK_DATADIR: there is no setting 'datadir' (did you mean PENSTOCK_DATA_DIR?)",
        ),
        (
            {"PENSTOCK_HTTP_LISTEN": "x"},
            "PENSTOCK_HTTP_LISTEN: there is no setting 'http_listen'"
            " (did you mean PENSTOCK_HTTP__LISTEN?)",
        ),
        (
            {"PENSTOCK_HTTP__LISTN": "x"},
            "PENSTOCK_HTTP__LISTN: there is no setting 'http.listn'"
            " (did you mean PENSTOCK_HTTP__LISTEN?)",
        ),
        ({"PENSTOCK_POOLS": "gpu"}, "PENSTOCK_POOLS: pools: is not valid JSON"),
        ({"PENSTOCK_POOLS": "[]"}, "PENSTOCK_POOLS: pools: expected object"),
        ({"PENSTOCK_LISTEN": "[1]"}, "PENSTOCK_LISTEN: listen.0: expected str"),
    ],
)
def test_a_wrong_variable_is_refused_by_name(environ: dict[str, str], said: str) -> None:
    assert refusal("", environ).startswith(said)


def test_a_wrong_flag_is_refused_by_name() -> None:
    said = "option timeouts.lease: timeouts.lease: expected float >= 1"
    assert refusal(timeouts__lease=-1).startswith(said)
    assert "did you mean concurrency?" in refusal(concurency=1)


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
    assert "line 1: storage.sources: " in refusal(f"storage.sources = [{source!r}]")


@pytest.mark.parametrize("source", [".", "..", "data"])
def test_a_source_that_holds_the_data_directory_is_refused(tmp_path: Path, source: str) -> None:
    folder = (tmp_path / source).resolve().as_uri()
    message = refusal(f"data_dir = 'data'\nstorage.sources = [{folder!r}]")
    assert "line 2: storage.sources: " in message
    assert "token" in message


def test_settings_that_do_not_go_together_are_refused() -> None:
    said = "line 1: timeouts.lost_grace: is longer than timeouts.lease (15)"
    assert said in refusal("timeouts.lost_grace = 16")
    assert "timeouts.lost_grace" in refusal(timeouts__lease=2)
    assert "limits.max_input: is less than storage.inline_limit" in refusal(
        "limits.max_input = 100"
    )
    assert "http.certificate: goes with" in refusal("", http__private_key=__file__)


@given(
    st.dictionaries(
        st.sampled_from([*TYPES, *RENAMED]),
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just([]),
    )
)
def test_any_flags_give_settings_or_a_clear_refusal(flags: dict[str, Any]) -> None:
    try:
        assert isinstance(load(environ={}, flags=flags), Settings)
    except Misconfigured as refused:
        assert any(name in refused.message for name in TYPES)  # noqa: PT017


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
    kinds: list[type[Struct]] = [Settings, Pool, *SECTIONS.values()]
    for kind in kinds:
        said = sentences(kind)
        assert set(said) == set(kind.__struct_fields__) - set(SECTIONS)
        assert all(text.endswith(".") for text in said.values())


def test_the_example_on_the_reference_page_can_be_loaded() -> None:
    example = page().split("```toml\n")[1].split("```")[0]
    assert from_toml(example).pools["gpu"].capacity == 4
