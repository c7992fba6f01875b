"""Finding blocks of other engines without a router: members, a filter of keys from each, a few candidates to ask.

``member_lists`` who the members are; ``fleet`` the copies of their filters and the choice; ``finder`` the threads that
keep both up to date; ``registration`` this engine's own entry.
"""
