"""A job that tells how far it is, and a caller that watches."""

import logging
import time

import penstock
from penstock import Logged, Moved, Progressed

app = penstock.App()
log = logging.getLogger(__name__)


@app.job("job.photos.sort", ctx=True)
def sort_photos(ctx: penstock.Context, photos: int) -> int:
    """A plain function: it runs in a thread of the worker."""
    for done in range(1, photos + 1):
        ctx.cancel.raise_if_requested()  # a thread can't be killed, so it should look
        time.sleep(0.15)
        ctx.progress(done / photos, f"photo {done}")
        if done == photos // 2:
            log.warning("half of them are blurred")  # logging inside a job goes to its log
    ctx.log("all sorted")
    return photos


def main() -> None:
    with app.run():
        job = sort_photos.submit(4)
        for update in job.follow():
            match update:
                case Progressed(_, fraction, message) if fraction is not None:
                    print(f"{fraction:4.0%} {message}")
                case Logged(line):
                    print(f"     {line.level}: {line.text}")
                case Moved(entry):
                    print(f"     now {entry.after}")
        print("sorted", job.result())


if __name__ == "__main__":
    main()
