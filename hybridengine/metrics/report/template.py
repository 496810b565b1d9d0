"""The page's frame and style. What is inserted is escaped, but for what bokeh made."""

from __future__ import annotations

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{{ policy }}">
<title>{{ run_name }}: report of a run</title>
<style>{{ style|safe }}</style>
{{ library|safe }}
</head>
<body>
<header>
<h1>{{ run_name }}</h1>
<dl class="facts">
{%- for name, value in facts %}
<div><dt>{{ name }}</dt><dd>{{ value }}</dd></div>
{%- endfor %}
</dl>
<nav aria-label="Sections">
{%- for section in sections %}
<a href="#{{ section.anchor }}">{{ section.title }}</a>
{%- endfor %}
</nav>
</header>
<main>
<noscript><p class="note">The drawings of this page need JavaScript; tables and text do not.</p></noscript>
{%- for section in sections %}
<section id="{{ section.anchor }}" aria-labelledby="{{ section.anchor }}-title">
<h2 id="{{ section.anchor }}-title">{{ section.title }}</h2>
{%- if section.lead and section.blocks %}<p class="lead">{{ section.lead }}</p>{% endif %}
{%- for note in section.notes %}<p class="note">{{ note }}</p>{% endfor %}
{%- for block in section.blocks %}
{%- if block.kind == "charts" %}
{%- if block.heading %}<h3>{{ block.heading }}</h3>{% endif %}
<div class="{{ 'wide' if block.wide else 'grid' }}">
{%- for chart in block.charts %}
<figure>
<figcaption><span class="name">{{ chart.title }}</span>
{%- if chart.note %} <span class="quiet">{{ chart.note }}</span>{% endif %}
<span class="unseen">{{ chart.description }}</span></figcaption>
<div class="drawing">{{ drawings[chart.model]|safe }}</div>
{%- if chart.legend %}
<ul class="legend">
{%- for name, colour in chart.legend.items() %}
<li><span class="swatch" style="background: {{ colour }}"></span>{{ name }}</li>
{%- endfor %}
</ul>
{%- endif %}
</figure>
{%- endfor %}
</div>
{%- elif block.kind == "table" %}
<div class="scroll" tabindex="0" role="region" aria-label="{{ block.caption }}">
<table>
<caption>{{ block.caption }}</caption>
<thead><tr>
{%- for column in block.columns %}
<th scope="col"{% if loop.index > block.num_names %} class="number"{% endif %}>{{ column }}</th>
{%- endfor %}
</tr></thead>
<tbody>
{%- for row in block.rows %}
<tr>
{%- for cell in row %}
<td{% if loop.index > block.num_names %} class="number"{% endif %}>{{ cell }}</td>
{%- endfor %}
</tr>
{%- endfor %}
</tbody>
</table>
</div>
{%- elif block.kind == "samples" %}
<details{% if block.is_open %} open{% endif %}>
<summary>{{ block.heading }}</summary>
<table class="samples">
<thead><tr><th scope="col">prompt</th><th scope="col">response</th><th scope="col">answer</th>
<th scope="col" class="number">score</th></tr></thead>
<tbody>
{%- for sample in block.samples %}
<tr>
<td data-name="prompt"><div class="words">{{ sample.prompt }}</div></td>
<td data-name="response"><div class="words">{{ sample.response }}</div></td>
<td data-name="answer"><div class="words">{{ sample.answer }}</div></td>
<td data-name="score" class="number">{{ score(sample.score) }}</td>
</tr>
{%- endfor %}
</tbody>
</table>
</details>
{%- elif block.kind == "listing" %}
<pre tabindex="0">{{ block.text }}</pre>
{%- endif %}
{%- endfor %}
</section>
{%- endfor %}
</main>
{{ script|safe }}
</body>
</html>
"""

STYLE = """
:root { color-scheme: light; --ink: #26323a; --quiet: #56646d; --rule: #dbe1e5; --blue: #00538a; }
* { box-sizing: border-box; }
html { scroll-behavior: smooth; -webkit-text-size-adjust: 100%; }
body { margin: 0 auto; max-width: 84rem; padding: 0 1rem 3rem; color: var(--ink); background: #fff;
  font: 16px/1.5 system-ui, sans-serif; }
h1 { margin: 1.5rem 0 .5rem; font-size: 1.7rem; overflow-wrap: anywhere; }
h2 { margin: 2.5rem 0 .3rem; padding-top: 1rem; border-top: 1px solid var(--rule); font-size: 1.3rem; }
h3 { margin: 1.3rem 0 .3rem; font-size: 1rem; }
a { color: var(--blue); }
nav { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; margin: 1rem 0; }
.facts { display: flex; flex-wrap: wrap; gap: .6rem 2rem; margin: 0; }
.facts dt { color: var(--quiet); font-size: .85rem; }
.facts dd { margin: 0; font-size: 1.15rem; font-variant-numeric: tabular-nums; }
.lead, .quiet { color: var(--quiet); }
.lead { margin: 0 0 .6rem; max-width: 60rem; }
.note { margin: .4rem 0; padding: .5rem .8rem; border-left: 4px solid #e69f00; background: #fdf6e7;
  overflow-wrap: anywhere; }
.grid { display: grid; gap: .8rem 1.2rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 20rem), 1fr)); }
figure { margin: 0; min-width: 0; }
figcaption { font-size: .88rem; overflow-wrap: anywhere; }
figcaption .name { font-weight: 600; }
.unseen { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
.wide figure { margin-bottom: 1rem; }
.legend { display: flex; flex-wrap: wrap; gap: .1rem 1.1rem; margin: .2rem 0 0; padding: 0; list-style: none;
  font-size: .88rem; overflow-wrap: anywhere; }
.swatch { display: inline-block; width: .8em; height: .8em; margin-right: .4em; border-radius: 2px; }
.scroll { overflow-x: auto; margin-top: .8rem; }
table { border-collapse: collapse; font-size: .9rem; }
caption { padding-bottom: .3rem; text-align: left; font-weight: 600; }
th, td { padding: .3rem .9rem .3rem 0; border-bottom: 1px solid var(--rule); text-align: left; vertical-align: top; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
details { margin: .6rem 0; }
summary { cursor: pointer; font-weight: 600; }
.samples { width: 100%; table-layout: fixed; }
.samples th:nth-child(3) { width: 16%; }
.samples th:nth-child(4) { width: 5rem; }
.words { max-height: 20rem; overflow: auto; white-space: pre-wrap; overflow-wrap: anywhere; }
pre { overflow-x: auto; max-height: 40rem; padding: .8rem; background: #f4f6f7; font-size: .85rem; }
@media (max-width: 45rem) {
  .samples thead { display: none; }
  .samples tr { display: block; padding: .6rem 0; border-bottom: 2px solid var(--rule); }
  .samples td { display: block; padding: .1rem 0; border: 0; text-align: left; }
  .samples td::before { content: attr(data-name); display: block; color: var(--quiet); font-size: .8rem; }
}
@media print { nav { display: none; } section { break-inside: auto; } figure { break-inside: avoid; } }
"""
