// The service worker of the playground: after the first load every file comes from the browser's own cache.
const BUILD = "@BUILD@";
const FILES = ["@FILES@"];

self.addEventListener("install", (event) => {
  event.waitUntil(caches.open(BUILD).then((cache) => cache.addAll(FILES)).then(() => self.skipWaiting()));
});

self.addEventListener("activate", (event) => {
  const old = (names) => names.filter((name) => name.startsWith("schedc-playground-") && name !== BUILD);
  event.waitUntil(
    caches.keys().then((names) => Promise.all(old(names).map((name) => caches.delete(name)))).then(() => self.clients.claim()),
  );
});

self.addEventListener("fetch", (event) => {
  const cached = caches.open(BUILD).then((cache) => cache.match(event.request, { ignoreSearch: true }));
  event.respondWith(cached.then((found) => found ?? fetch(event.request)));
});
