// Lets readers sort the rows of a gallery by a column: once for ascending, again for descending.
for (const table of document.querySelectorAll("table.gallery")) {
  const rows = table.tBodies[0];
  const headings = [...table.tHead.rows[0].cells];
  const key = (row, column) => row.cells[column].textContent.trim();
  headings.forEach((heading, column) => {
    if (rows.rows[0].cells[column].querySelector("img")) return;
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = heading.textContent;
    heading.replaceChildren(button);
    button.addEventListener("click", () => {
      const sign = heading.ariaSort === "ascending" ? -1 : 1;
      headings.forEach((each) => (each.ariaSort = null));
      heading.ariaSort = sign > 0 ? "ascending" : "descending";
      const order = (a, b) => sign * key(a, column).localeCompare(key(b, column), "en", { numeric: true });
      rows.append(...[...rows.rows].sort(order));
    });
  });
}
