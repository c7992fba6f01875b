"""`kvbm bench`: does KVBM make answers come sooner, and by how much?

``workload`` decides who asks what and when, ``client`` asks an OpenAI endpoint and times the answer, ``runner`` puts
the two together for every target and rate, ``results`` is what comes of it, ``report`` makes a page with plots of that.
"""
