// The figures of an answer. Times are milliseconds.

export class Figures {
  #started;
  #first = null; // when the first tokens came, and how many they were
  #now;
  #nTokens = 0;
  #nAccepted = 0;
  #progress = null; // how far the prompt is read
  #last = {}; // the chunk that has the server's own figures
  #finished = null; // the event

  constructor(now) {
    this.#started = this.#now = now;
  }

  count(chunk, pieces, now) {
    this.#now = now;
    pieces = pieces.filter(({ kind }) => kind !== "rejected");
    this.#finished = chunk.events?.find(({ event }) => event === "finished") ?? this.#finished;
    this.#nTokens += pieces.length;
    this.#nAccepted += pieces.filter((piece) => piece.kind === "accepted").length;
    if (pieces.length && this.#first === null) {
      this.#first = { now, nTokens: pieces.length };
    }
    this.#progress = chunk.prompt_progress ?? this.#progress;
    if (chunk.timings) {
      this.#last = chunk;
    }
  }

  // The tokens of the prompt and of the answer, as the server counted them; 0 if it did not.
  get nTotal() {
    const { timings } = this.#last;
    return timings ? timings.cache_n + timings.prompt_n + timings.predicted_n : 0;
  }

  // How many passes of the target added one token, two, and so on.
  get rounds() {
    return this.#finished?.n_drafted ? this.#finished.rounds_by_tokens : [];
  }

  // While the answer comes: what the page counted itself.
  running() {
    if (this.#first === null) {
      return reading(this.#progress);
    }
    const parts = [counted(this.#nTokens, "token")];
    const seconds = (this.#now - this.#first.now) / 1000;
    if (seconds > 0) {
      parts.push(`${figure((this.#nTokens - this.#first.nTokens) / seconds)} tokens/s`);
    }
    if (this.#nAccepted) {
      parts.push(`${percent(this.#nAccepted / this.#nTokens)} of them from drafts`);
    }
    return parts.join(" · ");
  }

  // At the end: the server's, as far as it gave them.
  final() {
    const { timings, speculative } = this.#last;
    if (!timings) {
      return this.#first === null ? "" : this.running();
    }
    const parts = [counted(timings.predicted_n, "token")];
    if (timings.predicted_per_second) {
      parts.push(`${figure(timings.predicted_per_second)} tokens/s`);
    }
    if (speculative?.estimated_speedup_range) {
      parts.push(gain(speculative.estimated_speedup_range));
    } else if (this.#finished?.estimated_speedup) {
      parts.push("what drafts saved is not known, since the machine was busy");
    }
    if (speculative?.n_drafted) {
      parts.push(`${speculative.mean_accepted_length.toFixed(1)} tokens per pass of the target`);
    }
    if (this.#first !== null) {
      parts.push(`first token after ${seconds(this.#first.now - this.#started)}`);
    }
    const cached = timings.cache_n ? `, ${timings.cache_n} of them cached` : "";
    parts.push(`${counted(timings.prompt_n + timings.cache_n, "prompt token")}${cached}`);
    if (speculative?.n_drafted) {
      const { n_accepted, n_drafted } = speculative;
      parts.push(`${n_accepted} of ${n_drafted} drafted accepted ` +
        `(${percent(n_accepted / n_drafted)})`);
    }
    return parts.join(" · ");
  }
}

function reading(progress) {
  const nNew = progress ? progress.processed - progress.cache : 0;
  if (nNew <= 0) {
    return "reading the prompt";
  }
  const left = ((progress.total - progress.processed) * progress.time_ms) / nNew;
  return `reading the prompt: ${percent(progress.processed / progress.total)} of ` +
    `${counted(progress.total, "token")}, ${seconds(left)} left`;
}

// Between which two numbers the gain is; the server gives none if its machine was busy.
function gain(range) {
  const [low, high] = range.map((each) => each.toFixed(1));
  const times = low === high ? low : `${low} to ${high}`;
  const isSure = Number(low) > 1 || Number(high) < 1;
  return isSure ? `${times} times as fast as without drafts` : `about as fast as without drafts (${times} times)`;
}

function counted(n, what) {
  return `${n} ${what}${n === 1 ? "" : "s"}`;
}

function percent(share) {
  return `${Math.round(100 * share)}%`;
}

// Three digits, or all before the point.
function figure(value) {
  return value.toFixed(value >= 100 ? 0 : value >= 10 ? 1 : 2);
}

function seconds(ms) {
  return ms < 999.5 ? `${ms.toFixed(0)} ms` : `${figure(ms / 1000)} s`;
}
