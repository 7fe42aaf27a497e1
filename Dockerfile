FROM python:3.12-slim-bookworm

RUN apt-get update -qq \
    && apt-get install -y -qq --no-install-recommends openjdk-17-jre-headless procps \
    && rm -rf /var/lib/apt/lists/* \
    && ln -s "$(dirname "$(dirname "$(readlink -f /usr/bin/java)")")" /opt/java
ENV JAVA_HOME=/opt/java

WORKDIR /opt/walbrook
COPY . .
RUN pip install --no-cache-dir '.[kafka,lakehouse]'

RUN useradd --system --create-home walbrook \
    && install -d -o walbrook -g walbrook /var/lib/walbrook
USER walbrook
# Not the sources: what runs is the installed package.
WORKDIR /var/lib/walbrook
VOLUME /var/lib/walbrook

ENTRYPOINT ["walbrook"]
CMD ["run", "--config", "/etc/walbrook/walbrook.yaml"]
