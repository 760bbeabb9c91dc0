"""`dmljax serve`: a bundle and an index behind HTTP, with a page to drop an image on.

    settings    what can be set, and the limits
    server      one process: the socket, signals, the end
    protocol    HTTP/1.1 of one connection, with limits on heads
    guard       request ids, limits, tokens and errors of every request
    api         the routes: what each takes and answers, checked and described (OpenAPI)
    app         what answers them
    formats     bodies in JSON, msgpack, raw float32, multipart
    budget      the memory that all requests take together
    counting    how many values a body has, before it is parsed
    workers     processes that decode images, and whose image is next
    decoding    what such a process does
    batching    images of many requests in one batch of the net
    generation  the bundle and the index in use, and their replacement while requests run
    pictures    pictures of stored items
    page.html   the page

docs/serve.md describes the routes.
"""
