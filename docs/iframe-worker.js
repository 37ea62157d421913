// Search on pages that were opened as files. Browsers start no Worker there; this one runs the script
// in a hidden frame, whose window takes the place of the worker's scope.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const scope = frame.contentWindow;
      scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = scope.document.createElement("script");
      script.src = address;
      this.ready = new Promise((loaded) => { script.onload = () => loaded(scope); });
      scope.document.body.append(script);
    }
    postMessage(data) {
      this.ready.then((scope) => scope.dispatchEvent(new scope.MessageEvent("message", { data })));
    }
  };
}
