"""A job that makes jobs: parents, children, and the steps of a workflow in order."""

import penstock

app = penstock.App()


@app.job("job.film.shoot")
async def shoot(scene: str) -> int:
    return 90 + len(scene)


@app.job("job.film.edit")
async def edit(seconds: list[int]) -> int:
    return sum(seconds) // 2


@app.job("job.film.make", ctx=True)
async def make_film(ctx: penstock.Context, scenes: list[str]) -> int:
    """What is submitted inside a job has that job as its parent."""
    workflow = ctx.request.workflow_id or ctx.job_id
    shots = [
        await shoot.options(workflow_id=workflow, step_index=index).asubmit(scene)
        for index, scene in enumerate(scenes)
    ]
    seconds = [await shot for shot in shots]
    cut = await edit.options(workflow_id=workflow, step_index=len(scenes)).asubmit(seconds)
    return await cut


def main() -> None:
    with app.run() as ps:
        film = make_film.submit(["dawn", "the sluice opens", "night"])
        print("the film has", film.result(), "seconds")

        print("its children:", len(ps.jobs(parent_job_id=film.job_id)))
        for step in ps.jobs(workflow_id=film.job_id):
            request = step.record.request
            print(f"  step {request.step_index}: {request.topic} {step.record.state}")


if __name__ == "__main__":
    main()
