"""The benchmark runs. How fast is no test's business."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.conftest import needs_runtime

ROOT = Path(__file__).parents[2]
PAGE = "# Figures\n\n<!-- figures -->\nold\n<!-- /figures -->\n\nThe end.\n"


@pytest.fixture(scope="module")
def drained(tmp_path_factory):
    """A small run, with the page and the file that it wrote."""
    folder = tmp_path_factory.mktemp("benchmark")
    page, figures = folder / "page.md", folder / "figures.json"
    page.write_text(PAGE)
    options = ["--quick", "--no-peers", "--only", "drain", "--jobs", "500"]
    where = ["--json", str(figures), "--write", str(page), "--folder", str(folder)]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "engine.py"), *options, *where],
        capture_output=True,
        text=True,
        timeout=55,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, page.read_text(), json.loads(figures.read_text())


def test_it_prints_a_table_and_the_command_that_makes_it_again(drained):
    printed, _, _ = drained
    assert "| drained by 1 worker process, jobs/s" in printed
    assert "`python benchmarks/engine.py --quick --only drain --jobs 500 --no-peers`" in printed


def test_it_renews_a_page_between_its_marks(drained):
    printed, page, _ = drained
    assert page == PAGE.replace("old", f"\n{printed}")


def test_it_keeps_every_figure(drained):
    _, _, figures = drained
    assert figures["plan"]["jobs"] == 500
    assert set(figures["results"]) == {
        "drain-1",
        "drain-2",
        "drain-in-process",
        "drain-threads",
        "drain-idempotent",
    }
    assert all(found["penstock"]["rate"] > 0 for found in figures["results"].values())


def test_it_refuses_what_it_does_not_know():
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "engine.py"), "--only", "speed"],
        capture_output=True,
        text=True,
        timeout=55,
    )
    assert done.returncode == 2
    assert "nothing is called speed" in done.stderr


@pytest.fixture(scope="module")
def over_http(tmp_path_factory):
    """The smallest run of the HTTP benchmark, with the page and the file that it wrote."""
    folder = tmp_path_factory.mktemp("http")
    page, figures = folder / "page.md", folder / "figures.json"
    page.write_text(PAGE)
    where = ["--json", str(figures), "--write", str(page), "--folder", str(folder)]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "http_api.py"), "--tiny", *where],
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, page.read_text(), json.loads(figures.read_text())


@pytest.mark.timeout(180)
def test_over_http_it_prints_every_table_and_renews_a_page(over_http):
    printed, page, _ = over_http
    assert "`python benchmarks/http_api.py --tiny`" in printed
    for row in ("| submit, durable ", "| batch 20 ", "| all, deep ", "| 3 readers, "):
        assert row in printed
    assert page == PAGE.replace("old", f"\n{printed}")


@pytest.mark.timeout(180)
def test_over_http_it_finds_out_every_figure(over_http):
    _, _, figures = over_http
    results = figures["results"]
    one_by_one = results["requests"].values()
    assert len(one_by_one) == 4
    assert all(found["rate"] > 0 and found["cpu_us"] > 0 for found in one_by_one)
    assert set(results["bulk-20"]) == {"penstock", "engine"}
    assert {"bulk-stream", "reading", "events-3"} <= set(results)


@pytest.mark.timeout(120)
def test_the_dashboard_benchmark_measures_pages_and_viewers_and_judges_them(tmp_path):
    figures = tmp_path / "figures.json"
    where = ["--json", str(figures), "--folder", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "dashboard.py"), "--tiny", *where],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(figures.read_text())["results"]
    assert results["pages"]["penstock"]["overview p50_ms"] > 0
    assert results["viewers"]["penstock"]["watched_percent"] > 0
    assert "| 3 viewers of an idle engine, of a core" in done.stdout


@pytest.mark.timeout(180)
def test_the_pipeline_benchmark_measures_runs_and_items_and_judges_them(tmp_path):
    page, figures = tmp_path / "page.md", tmp_path / "figures.json"
    page.write_text(PAGE)
    where = ["--json", str(figures), "--write", str(page), "--folder", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "pipeline.py"), "--tiny", "--no-peers", *where],
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(figures.read_text())["results"]
    assert {"jobs-1", "jobs-32", "items-5", "growth-100", "growth-1000", "beside"} <= set(results)
    assert all(found["penstock"] for found in results.values())
    assert "| durable items, 5 at once" in page.read_text()


@pytest.mark.timeout(180)
def test_the_container_benchmark_measures_the_bare_runtime_and_ours_and_judges_them(tmp_path):
    needs_runtime("runc")
    page, figures = tmp_path / "page.md", tmp_path / "figures.json"
    page.write_text(PAGE)
    where = ["--json", str(figures), "--write", str(page), "--folder", str(tmp_path)]
    script = str(ROOT / "benchmarks" / "container.py")
    done = subprocess.run(
        [sys.executable, script, "--tiny", "--only", "runc", *where],
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(figures.read_text())["results"]["runc"]
    assert set(results) == {"command", "penstock", "example"}
    for side in ("command", "penstock"):
        assert {"run_ms", "rate_4", "output_s"} <= set(results[side])
        assert min(results[side].values()) > 0
    assert "| runc: start to exit " in page.read_text()


@pytest.mark.timeout(120)
def test_the_benchmark_on_postgresql_measures_a_takeover(tmp_path):
    figures = tmp_path / "figures.json"
    script = str(ROOT / "benchmarks" / "scale_out.py")
    done = subprocess.run(
        [sys.executable, script, "--tiny", "--only", "takeover", "--json", str(figures)],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(figures.read_text())["results"]["takeover"]["penstock"]
    assert found["takeover_s"] > 0
    assert "| a killed owner is replaced in less than 5 s" in done.stdout


@pytest.mark.seed("004", "13.3")
@pytest.mark.timeout(180)
def test_the_spool_benchmark_measures_llama_cpp_and_ours_and_judges_them(tmp_path, model_file):
    page, figures = tmp_path / "page.md", tmp_path / "figures.json"
    page.write_text(PAGE)
    where = ["--json", str(figures), "--write", str(page), "--folder", str(tmp_path)]
    script = str(ROOT / "benchmarks" / "spool.py")
    done = subprocess.run(
        [sys.executable, script, "--tiny", "--model", str(model_file), *where],
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(figures.read_text())["results"]
    assert {"one", "llama", "penstock", "api"} <= set(results["answers"])
    assert results["answers"]["penstock"]["same"] == results["answers"]["api"]["same"] == 3
    assert {"streams-2", "queue-full", "queue-none", "requests", "start"} <= set(results)
    for by_side in results.values():
        assert min(min(found.values()) for found in by_side.values()) > 0
    assert "| submit to RUNNING, p50 " in page.read_text()


@pytest.mark.seed("000", "17.2", "18.2")
@pytest.mark.timeout(300)
def test_the_benchmark_of_split_models_measures_one_two_and_three_nodes_beside_generate(
    tmp_path, model_file
):
    page, figures = tmp_path / "page.md", tmp_path / "figures.json"
    page.write_text(PAGE)
    where = ["--json", str(figures), "--write", str(page), "--folder", str(tmp_path)]
    script = str(ROOT / "benchmarks" / "pipes.py")
    done = subprocess.run(
        [
            *(sys.executable, script, "--tiny", "--only=plumbing,halves"),
            *("--model", str(model_file), *where),
        ],
        capture_output=True,
        text=True,
        timeout=290,
    )
    assert done.returncode == 0, done.stderr
    everything = json.loads(figures.read_text())["results"]
    results = everything["plumbing"]
    assert set(results) == {"plain", "ours1", "ours2", "ours3"}
    assert min(figures["rate"] for figures in results.values()) > 0
    assert results["ours3"]["hops"] == 3
    assert everything["halves"]["limited2"]["hops"] == 2
    assert "| 3 nodes, plumbing alone " in page.read_text()
    assert "| 2 nodes that can't hold the model alone" in page.read_text()
