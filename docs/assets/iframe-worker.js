/* Search works in pages that are opened from a disk: browsers start no worker there, so its script runs in a hidden frame. */
if (location.protocol === "file:") {
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(script) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.documentElement.append(frame);
      const inside = frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const load = (url) =>
        new Promise((resolve, reject) => {
          const element = inside.document.createElement("script");
          Object.assign(element, { src: url, onload: resolve, onerror: reject });
          inside.document.documentElement.append(element);
        });
      inside.importScripts = (...urls) => urls.reduce((before, url) => before.then(() => load(url)), Promise.resolve());
      inside.__index = window.__index;
      this.ready = load(new URL(script, location.href).href);
      this.inside = inside;
    }
    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data })));
    }
    terminate() {}
  };
}
