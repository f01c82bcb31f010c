"use strict";
// Loads a page again when the records that it shows have changed; the browser keeps the place on it.
(() => {
  const shown = document.documentElement.dataset.stamp;
  const bar = document.querySelector("header");
  const state = bar.insertBefore(document.createElement("span"), document.getElementById("theme"));
  state.id = "live";
  state.setAttribute("role", "status");
  const look = async () => {
    try {
      const answer = await fetch("/stamp", { cache: "no-store" });
      if (await answer.text() !== shown) return location.reload();
      state.textContent = "live";
    } catch {
      state.textContent = "the server has ended";
    }
    setTimeout(look, 1000);
  };
  look();
})();
