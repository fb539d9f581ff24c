// Says on the page why it cannot be shown, and leaves the error to the console.
function sayWhyNot(error) {
  const line = document.getElementById("failure");
  line.hidden = false;
  line.textContent = "DecompressionStream" in globalThis
    ? `This page cannot be shown: ${error.message}`
    : "This page needs a newer browser (DecompressionStream): Chromium 85, Firefox 113, Safari 16.4 or later.";
  throw error;
}
