"""The playground: a page that checks and draws a schedule inside the browser, without a server."""
