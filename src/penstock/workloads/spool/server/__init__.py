"""The server of a workspace: finds queued jobs, claims them by rename, and ends them.

Who has a job: before a server renames a job into `processing`, it makes a file
`.penstock/servers/<server>/claims/<job_id>`; once the job has left `processing`, it removes it.
It holds the lock in its folder as long as it lives. So a job in `processing` is an orphan if no
living server has a claim on it.

Way back: a job goes from `processing` to `input/ready` only under `.penstock/returning.lock`.
Whoever holds that lock and sees a job in `processing` knows that its owner may let go of it, but
that nobody new can have claimed it; so what is judged an orphan is one when it is moved.
"""
