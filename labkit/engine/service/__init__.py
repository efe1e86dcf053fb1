"""A systemd service that serves a model: swapped for a variant of it, and put back whatever happens.

plan        what a swap would change and do, as data (`units`, `flags`, `words`: the second unit file)
swap        the lab's side: the context in which the variant serves, restore, status
guard       the process that carries the swap out and puts the original back when the lab is gone
steps       what the guard does: stop, wait, start, wait, put back
state       how far a swap is, on disk, and the lock
systemd     what is asked of systemctl
experiment  what `labkit swap` does while the variant serves
"""
