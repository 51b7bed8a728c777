"""A command in a container: files in, files out, limits, and a reason when it fails.

It needs an engine: Docker, Podman, or runc with root ('penstock doctor' says which work), and
the image alpine:latest.
"""

from __future__ import annotations

import penstock


def main() -> None:
    count = penstock.container(
        "alpine:latest",
        *("sh", "-c", "wc -w < /input/text.txt | tee /output/count.txt"),
        inputs={"text.txt": "no capabilities, no network, nothing writable but /output\n"},
        outputs=True,
        memory_mb=64,
        timeout=30,
    )
    ran = count.run()
    print(ran.exit_code, ran.stdout.strip(), ran.read("count.txt"))

    late = penstock.container("alpine:latest", "sleep", "60", timeout=0.5).run()
    print(late.error_code, late.error_message)


if __name__ == "__main__":
    main()
