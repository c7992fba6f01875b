"""Pure bookkeeping: which tier holds a block, which reader pins it, which block is evicted first.

Nothing here touches bytes, devices, files, sockets or clocks; nothing here is thread-safe. One thread, the leader's,
owns every object of this package. That is what makes it possible to test all of it with random histories.
"""
