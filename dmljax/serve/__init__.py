"""`dmljax serve`: a bundle and an index over HTTP, with a page to drop an image on.

    settings    what can be set, and the limits
    server      one process: socket, log, end
    app         checks of every request, and the handlers of the routes
    api         the routes: what each takes, and refusals
    service     the bundle and the index in use
    decoding    worker processes that decode images and can be killed
    batching    images of many requests in one batch of the net
    pictures    pictures of stored items
    page.html   the page

What a server for the internet needs besides (slow clients, many connections, TLS) is the work of a
proxy in front: `launch/serve.nginx.conf`. docs/serve.md describes the routes.
"""
