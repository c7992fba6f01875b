"""`kvbm bench`: measure how much KVBM shortens the time to first token.

``workload`` makes the requests and their times, ``client`` sends them to an OpenAI endpoint and measures the answers,
``runner`` combines the two for every target and rate, ``results`` holds and summarises the samples, and ``report``
writes a page with plots.
"""
