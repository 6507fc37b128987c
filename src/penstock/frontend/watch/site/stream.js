// Snapshots of the server, one a second, for as long as the page is seen.
export const keys = {
  get token() { return sessionStorage.getItem("penstock-token") || ""; },
  set token(value) { sessionStorage.setItem("penstock-token", value); },
  get api() { return sessionStorage.getItem("penstock-api-key") || ""; },
  set api(value) { sessionStorage.setItem("penstock-api-key", value); },
};

export const watchHeaders = () => (keys.token ? {Authorization: `Bearer ${keys.token}`} : {});
export const chatHeaders = () => (keys.api ? {Authorization: `Bearer ${keys.api}`} : {});

export async function* lines(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let begun = "";
  for (;;) {
    const {done, value} = await reader.read();
    if (done) return;
    const whole = (begun + value).split("\n");
    begun = whole.pop();
    yield* whole;
  }
}

export async function refusal(response) {
  try { return (await response.json()).error.message; } catch { return `the server answers ${response.status}`; }
}

export class Stream {
  constructor({onSnapshot, onStatus, onKeyNeeded}) {
    Object.assign(this, {onSnapshot, onStatus, onKeyNeeded});
    this.aborter = null;
    this.isPaused = false;
    document.addEventListener("visibilitychange", () => this.restart());
  }

  pause(isPaused) {
    this.isPaused = isPaused;
    this.restart();
  }

  restart() {
    if (this.aborter) this.aborter.abort();
    this.aborter = null;
    if (this.isPaused || document.hidden) this.onStatus("paused");
    else this.run();
  }

  async run() {
    const aborter = (this.aborter = new AbortController());
    let delay = 1;
    while (this.aborter === aborter) {
      try {
        const response = await fetch("/watch/events", {headers: watchHeaders(), signal: aborter.signal, cache: "no-store"});
        if (response.status === 401) { this.onStatus("needs the admin token"); this.onKeyNeeded(); return; }
        if (!response.ok) throw new Error(await refusal(response));
        delay = 1;
        for await (const line of lines(response)) {
          if (line.startsWith("data: ")) this.onSnapshot(JSON.parse(line.slice(6)));
        }
        throw new Error("the server has ended the stream");
      } catch (error) {
        if (this.aborter !== aborter) return;
        this.onStatus(`lost: ${error.message}; tries again`, true);
        await new Promise((resolve) => setTimeout(resolve, delay * 1000));
        delay = Math.min(2 * delay, 10);
      }
    }
  }
}
